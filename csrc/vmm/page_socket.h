// Messages of a socket on which a reader asks a writer for pages of a device: the writer sends each
// as a descriptor (SCM_RIGHTS), or as the bytes of a fabric handle. Neither end blocks in a call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "driver/driver.h"
#include "vmm/shared_file.h"

namespace vtensor {

// A question names handles of the writer; without handles it only asks the writer to wait for its
// work. The answer has the pages in the order of the handles, or says why there are none.
struct PageMessage {
  static constexpr std::size_t kMost = 128;  // pages; the kernel passes at most 253 descriptors

  // The bytes of a message, always sent whole.
  struct Content {
    std::uint64_t number;  // of the question
    FileId memory;         // the pages' memory
    std::uint32_t count;   // of handles in a question, of pages in an answer
    ExportKind kind;       // of the pages of an answer
    std::array<Handle, kMost> handles;
    std::array<decltype(ExportedPage::fabric), kMost> fabrics;
    std::array<char, 1000> refusal;  // ends with a zero
  } content{};
  std::vector<ExportedPage> pages;

  // Makes the message an answer that says why there are no pages.
  void refuse(std::string_view why) noexcept;
  // Sends the message. Returns 0, or an errno: EPIPE or ECONNRESET if the other end is gone.
  int send(const SharedFile& socket);
  // The next message; none if none has come yet. Sets `ended` if none will come: the other end is
  // gone, or sent something that is no message.
  static std::optional<PageMessage> receive(const SharedFile& socket, bool& ended);
};

}  // namespace vtensor
