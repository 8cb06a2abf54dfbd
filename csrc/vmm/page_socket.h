// A socket on which a reader asks the writer for pages of a device, and gets them: each a
// descriptor (SCM_RIGHTS), or the bytes of a fabric handle. Neither end waits in it.
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

// A question names handles of the writer; without any it asks the writer for its work's end alone.
// The answer has the pages in that order, or says why there are none.
struct PageMessage {
  static constexpr std::size_t kMost = 128;  // pages; the kernel passes at most 253 descriptors

  // As it is sent, whole.
  struct Content {
    std::uint64_t number;  // of the question
    FileId memory;         // that is asked for
    std::uint32_t count;   // of handles, or of pages that come
    ExportKind kind;       // of the pages of an answer
    std::array<Handle, kMost> handles;
    std::array<decltype(ExportedPage::fabric), kMost> fabrics;
    std::array<char, 1000> refusal;  // ends with a zero
  } content{};
  std::vector<ExportedPage> pages;

  // Says why there are no pages.
  void refuse(std::string_view why) noexcept;
  // 0, or what the system refuses it with: EPIPE or ECONNRESET if the other end is gone.
  int send(const SharedFile& socket);
  // The next message. None if there is none yet, or `ended` if none comes any more: the other end
  // is gone, or sent what is no message.
  static std::optional<PageMessage> receive(const SharedFile& socket, bool& ended);
};

}  // namespace vtensor
