// What a client says of one of its pages, for people.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver/driver.h"

namespace vtensor {

struct PageRecord {
  std::size_t row;
  std::size_t index;  // of the page in its row
  Address address;
  std::int64_t page_id;  // -1 if the kernel copied it and it has no handle of its own yet
  std::uint32_t shared;  // references to the page
  const char* state;     // "mapped", "shared", "prefetched", "cached", "private", "pinned",
                         // "asleep"
};

}  // namespace vtensor
