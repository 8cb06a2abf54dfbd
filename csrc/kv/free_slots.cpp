#include "kv/free_slots.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/errors.h"

namespace vtensor {

FreeSlots::FreeSlots(SlotBuffers& buffers) : buffers_(buffers), free_(buffers.shape().slots) {
  std::iota(free_.begin(), free_.end(), std::size_t{0});
}

void FreeSlots::require(const Caller& caller, std::size_t n) const {
  if (has(n)) return;
  throw NoFreeSlot("[", caller.operation, "] need ", n, " free slots, ", free_.size(), " of ",
                   buffers_.shape().slots,
                   " are: free(slot) one, or make the cache with a larger max_batch");
}

std::optional<FreeSlots::Fit> FreeSlots::fit(std::size_t slot) const {
  Fit fit;
  for (std::size_t group = 0; group < buffers_.groups(); ++group) {
    const Buffer* buffer = buffers_.of(slot)[group].get();
    if (buffer == nullptr || buffer->vacant()) {
      fit.cached = 0;
      continue;
    }
    if (!buffer->reusable()) return std::nullopt;
    const Interval cached = buffer->cached();
    fit.before = std::min(fit.before, cached.begin);
    const std::size_t end = cached.begin == 0 ? cached.end * buffers_.pool()->page_size() : 0;
    fit.cached = std::min(fit.cached, end / buffers_.group(group).item_bytes);
  }
  return fit;
}

// The slot that costs least, and of several the first.
FreeSlots::Choice FreeSlots::cheapest(const Cost& cost) const {
  Choice best;
  std::size_t least = kAll;
  for (const std::size_t slot : free_) {
    const std::optional<Fit> seen = fit(slot);
    const Choice costs = seen ? cost(*seen) : std::nullopt;
    if (!costs || (best && std::pair(*costs, slot) > std::pair(least, *best))) continue;
    best = slot;
    least = *costs;
  }
  return best;
}

// Whether pages of some free slot are on their way out, as far as the driver lets them go.
bool FreeSlots::leaving() const {
  return std::any_of(free_.begin(), free_.end(), [this](std::size_t slot) VT_LOCKED {
    return !fit(slot) && refusal(slot) == nullptr;
  });
}

// Why pages of the slot stay.
std::exception_ptr FreeSlots::refusal(std::size_t slot) const {
  for (const std::shared_ptr<Buffer>& buffer : buffers_.of(slot)) {
    if (buffer && buffer->refusal()) return buffer->refusal();
  }
  return nullptr;
}

// Has the slot with the fewest cached positions give its pages back. False if none has any.
bool FreeSlots::evict_one() {
  const Choice slot = cheapest(
      [](const Fit& fit) { return fit.before == kAll ? std::nullopt : Choice(fit.cached); });
  if (!slot) return false;
  for (const std::shared_ptr<Buffer>& buffer : buffers_.of(*slot)) {
    if (buffer && !buffer->cached().empty()) buffer->evict();
  }
  return true;
}

std::size_t FreeSlots::take(const Caller& caller, const Cost& cost) {
  require(caller, 1);
  const std::shared_ptr<PagePool>& pool = buffers_.pool();
  for (;;) {
    Choice slot;
    {
      PoolLock lock(pool);
      pool->reap();
      const auto choose = [&]() VT_LOCKED {
        do {
          slot = cheapest(cost);
        } while (!slot && !leaving() && evict_one());
        return slot.has_value();
      };
      if (!choose()) {
        pool->await(lock, caller.operation, "the work that used the pages of a freed slot",
                    [&]() VT_LOCKED {
                      static_cast<void>(pool->settle_all(lock));
                      if (choose() || leaving()) return slot.has_value();
                      for (const std::size_t stays : free_) {
                        if (refusal(stays)) std::rethrow_exception(refusal(stays));
                      }
                      return false;
                    });
      }
    }
    // The pool takes cached pages back without asking, so the slot may be another by now.
    if (!buffers_.place(caller, *slot)) continue;
    std::erase(free_, *slot);
    return *slot;
  }
}

std::size_t FreeSlots::take(const Caller& caller, std::size_t expected) {
  const std::size_t enough = expected == 0 ? kAll : expected;
  return take(caller, [enough](const Fit& fit) -> Choice {
    return fit.cached >= enough ? fit.cached - enough : kAll - fit.cached;
  });
}

std::size_t FreeSlots::take_empty(const Caller& caller, std::size_t pages) {
  return take(caller, [pages](const Fit& fit) {
    return fit.before >= pages ? Choice(fit.cached) : std::nullopt;
  });
}

}  // namespace vtensor
