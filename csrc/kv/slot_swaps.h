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
  void forget_ended() noexcept;
  // Requires: all slots are free. Waits for nothing: the pool keeps host memory that copies may
  // still use.
  void close() noexcept;

  // Whether the band of `layer`, or any band, is in host memory.
  bool is_away(std::size_t slot, std::optional<std::size_t> layer) const;
  // A fence after the copies of a slot that `layer` waits for, or after all of them. Null if there
  // are none.
  FencePtr copies(std::size_t slot, std::optional<std::size_t> layer);
  // Whether slots may be in host memory, whole or in part, or being copied from there.
  // `hide_absent` sets the lengths of these slots to 0.
  bool any_absent() const noexcept { return !images_.empty() || !arriving_.empty(); }
  void hide_absent(std::span<std::int64_t> lengths) const noexcept;
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

  // Positions of a swapped slot whose pages another slot with its head has, or brings back first.
  // `heads`: those already counted by the caller; adds the slot's.
  std::size_t shared_positions(std::size_t slot, std::unordered_set<const void*>& heads) const;
  // Bytes of host memory that swapped slots take.
  std::size_t bytes() const;

 private:
  // Host memory with the positions of a slot, of a band of one, or of a head: the positions that
  // slots which were swapped out together begin with, in the same pages.
  struct Image {
    std::size_t length = 0;
    std::size_t bytes = 0;
    HostMemory memory = nullptr;
    FencePtr copied = nullptr;  // after the copies to it
    Image* head = nullptr;      // which has its first positions; null: it has them itself
    std::size_t uses = 0;       // bands in it; of a head: slots that have not come back
    Prefix pages = {};          // of a head: its pages, once the first slot is back
    std::optional<FencePtr> until = std::nullopt;  // made once it has no use, for its end
  };
  // Copies from host memory under way, of rows that `layer` is the first to read.
  struct Arriving {
    std::size_t slot, layer;
    FencePtr over;
  };
  // A slot, or one band of a slot: what is swapped as a unit.
  struct Part {
    std::size_t slot;
    Bands bands;
    std::vector<std::size_t> groups;
    Image* image;
  };
  // A copy between one row of a slot and host memory.
  struct Copy {
    std::size_t layer;  // the first that reads them
    Address at;
    const Image* image;
    std::size_t offset, bytes;
  };

  std::vector<Part> parts_of(std::span<const std::size_t> slots, Bands bands) const;
  std::size_t add_copies(std::vector<Copy>& copies, const Part& part, std::size_t length,
                         const Image& image) const;
  void join(std::span<const Part> parts, std::list<Image>& images) const;
  void order_copies(const Caller& caller, const Part& part);
  void bring_in(const Caller& caller, const Part& part, std::list<Arriving>& arriving);
  void restore(const Caller& caller, const Part& part, std::size_t length, const Prefix& prefix);
  void send_back(const Part& part) noexcept;
  void share_again(const Caller& caller, const Part& part) noexcept;
  void drop(std::size_t slot, Bands bands) noexcept;
  void end_use(Image& image) noexcept;
  FencePtr last_arrival(std::size_t slot, std::optional<std::size_t> layer = std::nullopt) const;

  SlotBuffers& buffers_;
  const SlotLengths& lengths_;
  Driver& driver_;
  std::list<Image> images_;                // in use
  std::list<Image> unused_;                // copies may still read or write them
  std::vector<std::vector<Image*>> away_;  // [slot][band]: null if it has pages
  std::list<Arriving> arriving_;           // in the order of their copies
};

}  // namespace vtensor
