// What of a cache's slots is in host memory, or on its way, by copies beside their callers.
//
// The copies run in the driver's copying stream, which the slots' buffers know as one that uses
// their pages: so whatever else happens, pages that are being copied stay mapped until it is done.
#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <unordered_set>
#include <vector>

#include "driver/driver.h"
#include "kv/prefix_index.h"
#include "kv/slot_buffers.h"
#include "kv/slot_lengths.h"
#include "vmm/caller.h"

namespace vtensor {

// Gives so many bytes of it, which copies of the driver reach. Throws OutOfPages.
using AllocateHost = std::function<HostMemory(std::size_t bytes)>;

// What leaves by itself, a slot or one band of it, comes back by itself.
class SlotSwaps {
 public:
  SlotSwaps(SlotBuffers& buffers, const SlotLengths& lengths);

  // Copies slots, or some bands of them, to host memory, behind the work launched so far; their
  // pages go once they are copied. Whole slots that share pages are copied once, and share them
  // again afterwards. All or nothing.
  void swap_out(const Caller& caller, std::span<const std::size_t> slots, Bands bands,
                const AllocateHost& allocate);
  // Gives them pages again, at their addresses, and launches the copies, layer by layer. All or
  // nothing.
  void swap_in(const Caller& caller, std::span<const std::size_t> slots, Bands bands);
  // Nothing of the slot is needed any more.
  void forget(std::size_t slot) noexcept;
  // Forgets copies that are over.
  void settle() noexcept;
  // Of a cache whose slots are free. Waits for nothing: the pool keeps memory that copies may still
  // use.
  void close() noexcept;

  // Whether something that `layer` reads, or any layer, is in host memory.
  bool is_away(std::size_t slot, std::optional<std::size_t> layer) const;
  // A point behind the copies of a slot: those that `layer` waits for, or all. Null if there are
  // none.
  FencePtr copies(std::size_t slot, std::optional<std::size_t> layer);
  // A point behind the copies of all slots that come back. Null if there are none.
  FencePtr arrivals();
  // Returns once the slot is no longer being copied from host memory. Throws TimedOut.
  void await_arrival(const Caller& caller, std::size_t slot);
  // What the caller's stream does to the slot from now on comes behind that.
  void order_arrival(const Caller& caller, std::size_t slot);
  // Returns once what a slot has in host memory has given its pages back. Requires: its copies are
  // over.
  void await_departure(const Caller& caller, std::size_t slot,
                       std::optional<std::size_t> layer = std::nullopt) const;

  // Positions of a whole slot whose pages others of its group bring back, or have. Adds the group
  // to `groups`, which the slots before it have counted.
  std::size_t shared_positions(std::size_t slot, std::unordered_set<const void*>& groups) const;
  // Bytes of host memory that swapped slots take.
  std::size_t bytes() const { return bytes_; }

 private:
  // Host memory that copies may still use.
  struct Held {
    HostMemory memory = nullptr;
    std::size_t bytes = 0;
    // It is let go once this has passed, which is made when the holder no longer needs it.
    std::optional<FencePtr> until = std::nullopt;
  };
  // Slots that were swapped out together and begin with the same pages.
  struct Group {
    std::size_t length = 0;   // positions whose pages are the same
    std::list<Held> head;     // their bytes
    std::size_t waiting = 0;  // slots that have not come back
    Prefix pages;             // once the first slot has them again
  };
  struct Swapped {
    std::size_t length = 0;
    std::list<Held> memory;  // the bytes that it shares with no other
    std::shared_ptr<Group> group;
    FencePtr copied;
  };
  // A copy on its way in, of what `layer` is the first to read.
  struct Arriving {
    std::size_t layer, band;
    FencePtr over;
  };
  struct Slot {
    std::vector<std::shared_ptr<Swapped>> away;  // of each band, or of all; null while it is here
    std::list<Arriving> arriving;                // in the order of their copies
  };
  // What leaves or comes back by itself.
  struct Part {
    std::size_t slot;
    Bands bands;
    std::vector<std::size_t> groups;
    std::shared_ptr<Swapped> swapped;
  };
  // Of bytes in one row of a slot.
  struct Copy {
    std::size_t layer;  // the first that reads them
    Address at;
    const Held* memory;
    std::size_t offset, bytes;
  };

  std::vector<Part> parts_of(std::span<const std::size_t> slots, Bands bands) const;
  std::size_t add_copies(std::vector<Copy>& copies, const Part& part, bool head, std::size_t length,
                         const Held& memory) const;
  std::shared_ptr<Group> join(std::span<const Part> parts) const;
  void order_copies(const Caller& caller, const Part& part);
  std::list<Arriving> bring_in(const Caller& caller, const Part& part);
  void restore(const Caller& caller, const Part& part, std::size_t length, const Prefix& prefix);
  void send_back(const Caller& caller, const Part& part) noexcept;
  void share_again(const Caller& caller, const Part& part) noexcept;
  void drop(std::size_t slot, Bands bands) noexcept;
  void release(std::list<Held>& memory) noexcept;
  FencePtr last_arrival(std::size_t slot) const;

  SlotBuffers& buffers_;
  const SlotLengths& lengths_;
  Driver& driver_;
  std::vector<Slot> slots_;
  std::vector<std::size_t> arriving_;  // slots
  std::list<Held> held_;               // needed by no slot any more
  std::size_t bytes_ = 0;
};

}  // namespace vtensor
