// Slots, and bands of slots, that are in host memory or being copied there or back.
//
// Copies run in the driver's copying stream, asynchronously. The slots' buffers note that stream as
// one that uses their pages, so pages stay mapped until their copies have ended.
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

// Allocates `bytes` of host memory that the driver can copy to. Throws OutOfPages.
using AllocateHost = std::function<HostMemory(std::size_t bytes)>;

class SlotSwaps {
 public:
  SlotSwaps(SlotBuffers& buffers, const SlotLengths& lengths);

  // Copies slots, or some bands of them, to host memory, behind the work launched so far; their
  // pages go once they are copied. Whole slots that share pages are copied once, and share them
  // again afterwards. All or nothing.
  void swap_out(const Caller& caller, std::span<const std::size_t> slots, Bands bands,
                const AllocateHost& allocate);
  // Maps pages at the slots' addresses again and launches the copies, layer by layer. What was
  // swapped out as a slot or as a band comes back as such. All or nothing.
  void swap_in(const Caller& caller, std::span<const std::size_t> slots, Bands bands);
  // The slot is freed: drops its host memory.
  void forget(std::size_t slot) noexcept;
  // Drops host memory, and records of arrivals, whose copies have ended.
  void settle() noexcept;
  // Requires: all slots are free. Waits for nothing: the pool keeps host memory that copies may
  // still use.
  void close() noexcept;

  // Whether the band of `layer`, or any band, is in host memory.
  bool is_away(std::size_t slot, std::optional<std::size_t> layer) const;
  // A fence after the copies of a slot that `layer` waits for, or after all of them. Null if there
  // are none.
  FencePtr copies(std::size_t slot, std::optional<std::size_t> layer);
  // Whether copies of the slot, or of any slot, from host memory may be under way.
  bool any_arriving() const noexcept { return !coming_.empty(); }
  bool is_arriving(std::size_t slot) const noexcept { return !arriving_[slot].empty(); }
  // A fence after the copies of all slots that are coming back. Null if there are none.
  FencePtr arrivals();
  // Waits until the slot's copies from host memory have ended. Throws TimedOut.
  void await_arrival(const Caller& caller, std::size_t slot);
  // Has the caller's stream wait for the slot's copies from host memory.
  void order_arrival(const Caller& caller, std::size_t slot);
  // Waits until the pages of a slot's swapped bands are unmapped. Requires: their copies have
  // ended.
  void await_departure(const Caller& caller, std::size_t slot,
                       std::optional<std::size_t> layer = std::nullopt) const;

  // Positions of a swapped slot whose pages another slot of its group has, or brings back first.
  // `groups`: those already counted by the caller; adds the slot's group.
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
    std::size_t length = 0;   // positions whose pages all slots shared
    std::list<Held> head;     // the bytes of those positions
    std::size_t waiting = 0;  // slots that have not come back
    Prefix pages;             // of those positions, once the first slot is back
  };
  struct Swapped {
    std::size_t length = 0;
    std::list<Held> memory;  // bytes of the positions past the group's
    std::shared_ptr<Group> group;
    FencePtr copied;
  };
  // Copies from host memory under way, of rows that `layer` is the first to read.
  struct Arriving {
    std::size_t layer, band;
    FencePtr over;
  };
  // A slot, or one band of a slot: what is swapped as a unit.
  struct Part {
    std::size_t slot;
    Bands bands;
    std::vector<std::size_t> groups;
    std::shared_ptr<Swapped> swapped;
  };
  // A copy between one row of a slot and host memory.
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
  void send_back(const Part& part) noexcept;
  void share_again(const Caller& caller, const Part& part) noexcept;
  void drop(std::size_t slot, Bands bands) noexcept;
  void release(std::list<Held>& memory) noexcept;
  FencePtr last_arrival(std::size_t slot) const;

  SlotBuffers& buffers_;
  const SlotLengths& lengths_;
  Driver& driver_;
  std::vector<std::vector<std::shared_ptr<Swapped>>> away_;  // [slot][band]: null if it has pages
  std::vector<std::list<Arriving>> arriving_;                // [slot], in the order of their copies
  std::vector<std::size_t> coming_;  // slots with copies from host memory under way
  std::list<Held> held_;             // memory that no slot needs and copies may still use
  std::size_t bytes_ = 0;
};

}  // namespace vtensor
