// Clients give their memory up and get memory back at the same addresses. Page tables, addresses,
// lengths and views stay. The caller saves and restores the contents: between the beginning and the
// end of falling asleep, and of waking, the bytes can be read and written at the addresses of
// `parts`.
//
// FallAsleep and WakeUp are whole or nothing: without `finish` everything is as before. Operations
// on the clients are refused (`Client::asleep`) from `add` until WakeUp ends, and no other thread
// makes driver calls for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "driver/driver.h"
#include "policy/client.h"
#include "policy/page_pool.h"
#include "vmm/caller.h"
#include "vmm/page.h"

namespace vtensor {

// Bytes in memory, and their offset in the saved image of a sleep.
struct SleepPart {
  Address at;
  std::uint64_t sleep;  // number of the sleep
  std::size_t offset;
  std::size_t bytes;
};

// Neighbouring pages of a client, and how they are mapped.
struct SleepRun {
  Client* client;
  Reservation::Run pages;
  Access access;  // of the page table entries
  bool writable;  // mapped writable while the client wakes
  std::vector<Handle> handles;
};

using Clients = std::vector<std::shared_ptr<Client>>;
using AllBusy = std::vector<std::unique_ptr<Client::Busy>>;

// Waits for the copies launched so far. Throws DriverError, and TimedOut: "`what` has not ended".
void await_copies(PagePool& pool, const char* operation, const char* what);

class FallAsleep {
 public:
  explicit FallAsleep(const std::shared_ptr<PagePool>& pool) : pool_(pool) {}
  ~FallAsleep() { give_up(); }
  FallAsleep& operator=(FallAsleep&&) = delete;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }
  // Begins a number: clients added from now on have it, and wake together.
  std::uint64_t next_number();
  // Adds a client during an operation on it, so that no other is under way, and the next is
  // refused. Does nothing to a client that is asleep already.
  void add(const std::shared_ptr<Client>& client);
  // The numbers that clients were added with.
  std::set<std::uint64_t> numbers() const;

  // Waits until no launched work may use the clients' pages, gives up pages ahead of need or
  // cached, and unshares private copies. Throws TimedOut, OutOfPages, DriverError; the caller may
  // call it again then.
  void begin(const Caller& caller);
  // The bytes for the caller to save; a page with several mappings is in them once.
  const std::vector<SleepPart>& parts() const { return parts_; }
  std::size_t bytes() const;
  // Unmaps the pages, and gives their memory back; returns how many. Pages stay mapped that other
  // clients have too: forks that are awake, or in another sleep. Throws DriverError; nothing has
  // changed then, or the pool is broken.
  std::size_t finish();
  bool finished() const { return finished_; }
  // Unless finished, wakes the clients as they were.
  void give_up() noexcept;

 private:
  void await_work(PoolLock& lock) VT_LOCKED;
  void require_no_readers() VT_LOCKED;
  void explain(bool asleep) noexcept VT_LOCKED;
  void unshare_private_copies(PoolLock& lock) VT_LOCKED;
  std::size_t unmap_all();
  void unmap(PoolLock& lock, std::span<const SleepRun> runs) VT_LOCKED;

  const std::shared_ptr<PagePool> pool_;
  Caller caller_{"Pool.sleep"};
  std::uint64_t number_ = 0;
  Clients clients_;
  AllBusy busy_;  // the clients, from `begin` on
  std::vector<SleepPart> parts_;
  bool finished_ = false;
};

class WakeUp {
 public:
  // Gives the clients of these sleeps zeroed memory, mapped writable. Throws OutOfPages,
  // DriverError, TimedOut.
  WakeUp(const std::shared_ptr<PagePool>& pool, const Caller& caller,
         std::span<const std::uint64_t> numbers);
  ~WakeUp() { give_up(); }
  WakeUp& operator=(WakeUp&&) = delete;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }
  // Where the caller is to write the saved bytes.
  const std::vector<SleepPart>& parts() const { return parts_; }
  // Wakes the clients as they were; clients of sleeps that are not in `restored` have lost their
  // contents. Throws DriverError, TimedOut; the clients are asleep then.
  void finish(std::span<const std::uint64_t> restored);
  // Unless finished, lets the clients sleep on.
  void give_up() noexcept;

 private:
  // Collects pages, runs and parts. Returns the parts that may show old bytes.
  std::vector<SleepPart> collect() VT_LOCKED;
  // Puts the clients back to sleep (I8). The pool is broken if unmapping is refused, or copies do
  // not end.
  void undo(PoolLock& lock) noexcept VT_LOCKED;

  const std::shared_ptr<PagePool> pool_;
  const Caller caller_;
  Clients clients_;
  AllBusy busy_;                // the clients, until the end
  std::vector<Page*> pages_;    // each once
  std::vector<SleepRun> runs_;  // the writable ones first
  std::vector<SleepPart> parts_;
  std::size_t mapped_ = 0;  // pages of the runs mapped so far, the first ones
};

}  // namespace vtensor
