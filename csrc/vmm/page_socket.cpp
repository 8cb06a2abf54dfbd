#include "vmm/page_socket.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace vtensor {

namespace {

constexpr std::size_t kMostControl = CMSG_SPACE(PageMessage::kMost * sizeof(int));

// Adds the descriptors that came with a message.
void take_descriptors(const msghdr& message, std::vector<ExportedPage>& pages) {
  for (const cmsghdr* one = CMSG_FIRSTHDR(&message); one != nullptr;
       one = CMSG_NXTHDR(const_cast<msghdr*>(&message), const_cast<cmsghdr*>(one))) {
    if (one->cmsg_level != SOL_SOCKET || one->cmsg_type != SCM_RIGHTS) continue;
    const unsigned char* at = CMSG_DATA(one);
    for (const unsigned char* const end = at + (one->cmsg_len - CMSG_LEN(0)); at != end;
         at += sizeof(int)) {
      int descriptor;
      std::memcpy(&descriptor, at, sizeof descriptor);
      pages.push_back({.descriptor = Descriptor(descriptor)});
    }
  }
}

}  // namespace

void PageMessage::refuse(std::string_view why) noexcept {
  pages.clear();
  content.count = 0;
  content.refusal.fill(0);
  why.copy(content.refusal.data(), content.refusal.size() - 1);
}

int PageMessage::send(const SharedFile& socket) {
  iovec part{.iov_base = &content, .iov_len = sizeof content};
  msghdr sent{};
  sent.msg_iov = &part;
  sent.msg_iovlen = 1;
  alignas(cmsghdr) std::array<std::byte, kMostControl> control{};
  if (content.kind == ExportKind::fabric) {
    for (std::size_t i = 0; i < pages.size(); ++i) content.fabrics[i] = pages[i].fabric;
  } else if (const std::size_t size = pages.size() * sizeof(int)) {
    sent.msg_control = control.data();
    sent.msg_controllen = CMSG_SPACE(size);
    cmsghdr* const rights = CMSG_FIRSTHDR(&sent);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(size);
    for (std::size_t i = 0; i < pages.size(); ++i) {
      const int descriptor = pages[i].descriptor.get();
      std::memcpy(CMSG_DATA(rights) + i * sizeof(int), &descriptor, sizeof descriptor);
    }
  }
  return sendmsg(socket.descriptor(), &sent, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0 ? 0 : errno;
}

std::optional<PageMessage> PageMessage::receive(const SharedFile& socket, bool& ended) {
  PageMessage message;
  Content& content = message.content;
  message.pages.reserve(kMost);  // no descriptor is lost for lack of memory
  alignas(cmsghdr) std::array<std::byte, kMostControl> control;
  iovec part{.iov_base = &content, .iov_len = sizeof content};
  msghdr got{};
  got.msg_iov = &part;
  got.msg_iovlen = 1;
  got.msg_control = control.data();
  got.msg_controllen = control.size();
  const ssize_t size = recvmsg(socket.descriptor(), &got, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  if (size >= 0) take_descriptors(got, message.pages);  // an empty message may carry some too
  ended = size != sizeof content || (got.msg_flags & MSG_TRUNC) != 0 || content.count > kMost ||
          content.refusal.back() != 0;
  if (ended) return std::nullopt;
  if ((got.msg_flags & MSG_CTRUNC) != 0) {
    message.refuse("this process may open no more descriptors: raise the limit (ulimit -n)");
    return message;
  }
  ended = message.pages.size() != (content.kind == ExportKind::descriptors ? content.count : 0);
  if (ended) return std::nullopt;
  if (content.kind == ExportKind::fabric) {
    for (std::size_t i = 0; i < content.count; ++i)
      message.pages.push_back({.fabric = content.fabrics[i]});
  }
  return message;
}

}  // namespace vtensor
