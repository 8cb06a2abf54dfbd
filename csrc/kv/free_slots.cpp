#include "kv/free_slots.h"

#include <algorithm>
#include <limits>

#include "base/errors.h"

namespace vtensor {

FreeSlots::FreeSlots(SlotBuffers& buffers) : buffers_(buffers) {
  const std::size_t slots = buffers.shape().slots;
  unready_.reserve(slots);
  for (std::size_t slot = 0; slot < slots; ++slot) ready_.insert({0, slot});
}

void FreeSlots::require(const Caller& caller, std::size_t n) const {
  if (has(n)) return;
  throw NoFreeSlot("[", caller.operation, "] need ", n, " free slots, ", count(), " of ",
                   buffers_.shape().slots,
                   " are: free(slot) one, or make the cache with a larger max_batch");
}

FreeSlots::Fit FreeSlots::fit(std::size_t slot) const {
  constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();
  Fit fit{true, kAll, kAll};
  for (std::size_t group = 0; group < buffers_.groups(); ++group) {
    const Buffer* buffer = buffers_.of(slot)[group].get();
    if (buffer == nullptr || buffer->vacant()) {
      fit.cached = 0;
      continue;
    }
    if (!buffer->reusable()) return {};
    const Interval cached = buffer->cached();
    fit.before = std::min(fit.before, cached.begin);
    const std::size_t end = cached.begin == 0 ? cached.end * buffers_.pool()->page_size() : 0;
    fit.cached = std::min(fit.cached, end / buffers_.group(group).item_bytes);
  }
  return fit;
}

// Moves slots from unready_ to ready_ whose pages have left or are cached. Stops at 8 slots that
// cannot move, so an alloc takes the same time however many slots there are.
void FreeSlots::admit_ready() {
  std::size_t looks = 8;
  while (!unready_.empty() && looks != 0) {
    std::size_t& at = unready_[next_probe_ % unready_.size()];
    const Fit seen = fit(at);
    if (!seen.ready) {
      ++next_probe_;
      --looks;
      continue;
    }
    ready_.insert({seen.cached, at});
    at = unready_.back();
    unready_.pop_back();
  }
}

// Whether a ready slot still has the cached pages that it is listed under; lists it anew if not.
bool FreeSlots::confirm(Ready::iterator listed, Fit& seen) {
  const auto [cached, slot] = *listed;
  seen = fit(slot);
  if (seen.ready && seen.cached == cached) return true;
  auto node = ready_.extract(listed);  // listing it anew takes no memory
  if (seen.ready) {
    node.value().first = seen.cached;
    ready_.insert(std::move(node));
  } else {
    add(slot);
  }
  return false;
}

// The slot with the fewest cached positions that suffice, or else with the most.
FreeSlots::Choice FreeSlots::choose(std::size_t expected) {
  admit_ready();
  while (!ready_.empty()) {
    auto found = expected == 0 ? ready_.end() : ready_.lower_bound({expected, 0});
    if (found == ready_.end()) found = ready_.lower_bound({ready_.rbegin()->first, 0});
    Fit seen;
    if (confirm(found, seen)) return *found;
  }
  return std::nullopt;
}

// A slot with nothing mapped below `pages`. In the order of ready_, every slot after the first with
// cached positions has page 0 mapped too.
FreeSlots::Choice FreeSlots::choose_empty(std::size_t pages) {
  admit_ready();
  for (auto listed = ready_.begin(); listed != ready_.end();) {
    Fit seen;
    if (!confirm(listed, seen)) {
      listed = ready_.begin();
      continue;
    }
    if (seen.before >= pages) return *listed;
    if (seen.cached != 0) break;
    ++listed;
  }
  return std::nullopt;
}

// Whether pages of some free slot are on their way out, as far as the driver lets them go, or have
// left since the last look.
bool FreeSlots::leaving() const {
  return std::any_of(unready_.begin(), unready_.end(), [this](std::size_t slot) VT_LOCKED {
    return fit(slot).ready || refusal(slot) == nullptr;
  });
}

// Why pages of the slot stay.
std::exception_ptr FreeSlots::refusal(std::size_t slot) const {
  for (const std::shared_ptr<Buffer>& buffer : buffers_.of(slot)) {
    if (buffer && buffer->refusal()) return buffer->refusal();
  }
  return nullptr;
}

// Has the slot with the fewest cached positions give them back. False if none has any.
bool FreeSlots::evict_one() {
  for (const auto& [cached, slot] : ready_) {
    bool evicted = false;
    for (const std::shared_ptr<Buffer>& buffer : buffers_.of(slot)) {
      if (!buffer || buffer->cached().empty()) continue;
      buffer->evict();
      evicted = true;
    }
    if (evicted) return true;
  }
  return false;
}

// The slot that `choose` names, with the pool's lock held.
std::size_t FreeSlots::take(const Caller& caller, const std::function<Choice()>& choose) {
  require(caller, 1);
  const std::shared_ptr<PagePool>& pool = buffers_.pool();
  for (;;) {
    Choice choice;
    {
      PoolLock lock(pool);
      choice = choose();
      if (!choice) {
        pool->await(lock, caller.operation, "the work that used the pages of a freed slot",
                    [&]() VT_LOCKED {
                      static_cast<void>(pool->finish_unmapping(lock));
                      choice = choose();
                      if (choice || leaving()) return choice.has_value();
                      for (const std::size_t stays : unready_) {
                        if (refusal(stays)) std::rethrow_exception(refusal(stays));
                      }
                      return false;
                    });
      }
    }
    if (!choice || !buffers_.place(caller, choice->second)) continue;
    ready_.erase(*choice);
    return choice->second;
  }
}

std::size_t FreeSlots::take(const Caller& caller, std::size_t expected) {
  return take(caller, [&]() VT_LOCKED { return choose(expected); });
}

std::size_t FreeSlots::take_empty(const Caller& caller, std::size_t pages) {
  return take(caller, [&]() VT_LOCKED -> Choice {
    for (;;) {
      const Choice choice = choose_empty(pages);
      if (choice || leaving() || !evict_one()) return choice;
    }
  });
}

}  // namespace vtensor
