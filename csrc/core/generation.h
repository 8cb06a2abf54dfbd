// An immutable, published extent of mapped pages. A torch storage over it keeps it alive; its end
// is told to the pool from whatever thread drops that storage. The leaving of a buffer's owner is
// told in the same way.
#pragma once

#include <cstddef>
#include <memory>

#include "base/interval.h"

namespace vtensor {

class Buffer;

struct Generation {
  std::shared_ptr<Buffer> buffer;
  Interval slots;              // the same in every row
  std::size_t place = 0;       // in its buffer's list
  bool is_owner = false;       // stands for the owner, not for a storage
  Generation* next = nullptr;  // in the pool's list of ended generations
};

}  // namespace vtensor
