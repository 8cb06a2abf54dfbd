#include "vmm/page_socket.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/system_errors.h"

namespace vtensor {

namespace {

constexpr std::size_t kMostText = 1000;

// What a message begins with. Handles, the bytes of fabric handles or a text follow.
struct Head {
  std::uint64_t number;
  FileId memory;
  std::uint32_t handles, pages, text;  // how many follow
  ExportKind kind;
};
using Fabric = decltype(ExportedPage::fabric);

constexpr std::size_t kMostBytes = sizeof(Head) + PageMessage::kMost * sizeof(Fabric) + kMostText;
constexpr std::size_t kMostControl = CMSG_SPACE(PageMessage::kMost * sizeof(int));

template <typename T>
void append(std::vector<std::byte>& bytes, const T* from, std::size_t n) {
  const auto* const first = reinterpret_cast<const std::byte*>(from);
  bytes.insert(bytes.end(), first, first + n * sizeof(T));
}

// Adds the descriptors that came with a message.
void take_descriptors(const msghdr& message, std::vector<ExportedPage>& pages) {
  for (const cmsghdr* one = CMSG_FIRSTHDR(&message); one != nullptr;
       one = CMSG_NXTHDR(const_cast<msghdr*>(&message), const_cast<cmsghdr*>(one))) {
    if (one->cmsg_level != SOL_SOCKET || one->cmsg_type != SCM_RIGHTS) continue;
    const unsigned char* at = CMSG_DATA(one);
    for (const unsigned char* const end = at + (one->cmsg_len - CMSG_LEN(0)); at != end;
         at += sizeof(int)) {
      std::memcpy(&pages.emplace_back().descriptor, at, sizeof(int));
    }
  }
}

}  // namespace

void PageMessage::close_pages() noexcept {
  for (const ExportedPage& page : pages) {
    if (page.descriptor >= 0) close(page.descriptor);
  }
  pages.clear();
}

PageSocket::PageSocket(CallMeter& meter, const char* operation, Descriptor& other) {
  make_call(meter, operation, Call::socketpair, EMFILE, "a socket for a reader",
            "raise the limit on descriptors (ulimit -n), or close files",
            [&] { return file_.make_socket(other); });
}

bool PageSocket::is_end(int error) { return error == EPIPE || error == ECONNRESET; }

int PageSocket::send(const PageMessage& message) {
  const std::size_t text = std::min(message.refusal.size(), kMostText);
  const Head head{.number = message.number,
                  .memory = message.memory,
                  .handles = static_cast<std::uint32_t>(message.handles.size()),
                  .pages = static_cast<std::uint32_t>(message.pages.size()),
                  .text = static_cast<std::uint32_t>(text),
                  .kind = message.kind};
  std::vector<std::byte> bytes;
  append(bytes, &head, 1);
  append(bytes, message.handles.data(), message.handles.size());
  append(bytes, message.refusal.data(), text);
  std::vector<int> descriptors;
  for (const ExportedPage& page : message.pages) {
    if (message.kind == ExportKind::fabric) {
      append(bytes, &page.fabric, 1);
    } else {
      descriptors.push_back(page.descriptor);
    }
  }
  iovec part{.iov_base = bytes.data(), .iov_len = bytes.size()};
  msghdr sent{};
  sent.msg_iov = &part;
  sent.msg_iovlen = 1;
  alignas(cmsghdr) std::array<std::byte, kMostControl> control{};
  if (!descriptors.empty()) {
    const std::size_t size = descriptors.size() * sizeof(int);
    sent.msg_control = control.data();
    sent.msg_controllen = CMSG_SPACE(size);
    cmsghdr* const rights = CMSG_FIRSTHDR(&sent);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(size);
    std::memcpy(CMSG_DATA(rights), descriptors.data(), size);
  }
  return sendmsg(descriptor(), &sent, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0 ? 0 : errno;
}

std::optional<PageMessage> PageSocket::receive(bool& ended) {
  PageMessage message;
  message.pages.reserve(PageMessage::kMost);  // no descriptor is lost for lack of memory
  std::array<std::byte, kMostBytes> bytes;
  alignas(cmsghdr) std::array<std::byte, kMostControl> control;
  iovec part{.iov_base = bytes.data(), .iov_len = bytes.size()};
  msghdr got{};
  got.msg_iov = &part;
  got.msg_iovlen = 1;
  got.msg_control = control.data();
  got.msg_controllen = control.size();
  const ssize_t size = recvmsg(descriptor(), &got, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  if (size >= 0) take_descriptors(got, message.pages);  // an empty message may have some too
  Head head{};
  ended = true;
  if (size < static_cast<ssize_t>(sizeof head) || (got.msg_flags & MSG_TRUNC) != 0)
    return std::nullopt;
  std::memcpy(&head, bytes.data(), sizeof head);
  message.number = head.number;
  if ((got.msg_flags & MSG_CTRUNC) != 0) {
    ended = false;
    message.close_pages();
    message.refusal = "this process may open no more descriptors: raise the limit (ulimit -n)";
    return message;
  }
  const bool fabric = head.kind == ExportKind::fabric;
  const std::size_t fabrics = fabric ? head.pages : 0;
  if (head.handles > PageMessage::kMost || head.pages > PageMessage::kMost ||
      head.text > kMostText || message.pages.size() != head.pages - fabrics ||
      static_cast<std::size_t>(size) !=
          sizeof head + head.handles * sizeof(Handle) + head.text + fabrics * sizeof(Fabric))
    return std::nullopt;
  ended = false;
  const std::byte* at = bytes.data() + sizeof head;
  message.memory = head.memory;
  message.kind = head.kind;
  message.handles.resize(head.handles);
  std::copy_n(at, head.handles * sizeof(Handle),
              reinterpret_cast<std::byte*>(message.handles.data()));
  at += head.handles * sizeof(Handle);
  message.refusal.assign(reinterpret_cast<const char*>(at), head.text);
  at += head.text;
  message.pages.resize(head.pages);
  for (std::size_t i = 0; i < fabrics; ++i, at += sizeof(Fabric))
    std::memcpy(&message.pages[i].fabric, at, sizeof(Fabric));
  return message;
}

}  // namespace vtensor
