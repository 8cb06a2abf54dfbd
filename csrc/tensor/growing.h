// Growing: pages are claimed with the lock, mapped without it, and entered with it again; for one
// buffer or for many at once.
#pragma once

#include <span>

#include "base/interval.h"
#include "tensor/buffer.h"
#include "vmm/caller.h"

namespace vtensor {

// `positions` become the owner's: missing pages are mapped, shared pages of `written` positions are
// unshared, and `stale` positions are zeroed.
struct Growth {
  Buffer* buffer;
  Interval positions;
  Interval written;
  Interval stale = {};
};

// Grows several buffers of one pool, each named once: whole or nothing (I8), and mapped by one
// batch of driver calls. `populate` makes new memory present now.
void grow_all(const Caller& caller, std::span<const Growth> growths, bool populate);

}  // namespace vtensor
