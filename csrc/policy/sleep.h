// Clients that give their memory up and get it back at the same addresses. Page tables, addresses,
// lengths and views stay. The caller saves and restores the contents: between the beginning and the
// end of falling asleep, and of waking, the bytes are readable and writable at the addresses of
// `parts`.
//
// Both are whole or nothing: without `finish` everything is as it was. Operations on the clients
// are refused (`Client::asleep`) from `add` until WakeUp ends, and no other thread makes driver
// calls for them.
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

// Bytes in memory, and their offset in the saved image of their sleep.
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
  Access access;  // of its entries
  bool writable;  // mapped so, while the client wakes
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
  // A number for the clients that are added from now on, which wake together.
  std::uint64_t next_number();
  // Adds a client during an operation of its own: then none is under way, and the next is refused.
  // Without effect on one that is asleep already.
  void add(const std::shared_ptr<Client>& client);
  // The numbers that clients were added with.
  std::set<std::uint64_t> numbers() const;

  // Waits until no launched work may use the clients' pages, gives up what they have ahead of need
  // or cached, and gives what the kernel copied at writes pages of its own. Throws TimedOut,
  // OutOfPages, DriverError; it may be called again then.
  void begin(const Caller& caller);
  // The bytes that the caller is to save; a page with several mappings is in it once.
  const std::vector<SleepPart>& parts() const { return parts_; }
  std::size_t bytes() const;
  // Unmaps the pages, and gives their memory back; returns how many. Pages stay that other clients
  // have too, as forks that are awake or in another sleep. Throws DriverError; nothing has changed
  // then, or the pool is broken.
  std::size_t finish();
  bool finished() const { return finished_; }
  // Unless it is finished, wakes the clients, which are as they were.
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
  // Gives the clients of these sleeps memory again, which shows zeros, and maps it writable. Throws
  // OutOfPages, DriverError, TimedOut.
  WakeUp(const std::shared_ptr<PagePool>& pool, const Caller& caller,
         std::span<const std::uint64_t> numbers);
  ~WakeUp() { give_up(); }
  WakeUp& operator=(WakeUp&&) = delete;

  const std::shared_ptr<PagePool>& pool() const { return pool_; }
  // Where the caller is to write the saved bytes.
  const std::vector<SleepPart>& parts() const { return parts_; }
  // The clients are as they were, but that those in other sleeps than `restored` lost what their
  // pages held. Throws DriverError, TimedOut; they are asleep then.
  void finish(std::span<const std::uint64_t> restored);
  // Unless it is finished, has the clients sleep on.
  void give_up() noexcept;

 private:
  // Returns parts that may show old bytes.
  std::vector<SleepPart> collect() VT_LOCKED;
  // Back to sleep (I8). The pool is broken if the driver does not unmap it, or copies to it do not
  // end.
  void undo(PoolLock& lock) noexcept VT_LOCKED;

  const std::shared_ptr<PagePool> pool_;
  const Caller caller_;
  Clients clients_;
  AllBusy busy_;                // the clients, until it has ended
  std::vector<Page*> pages_;    // each once
  std::vector<SleepRun> runs_;  // the writable ones first
  std::vector<SleepPart> parts_;
  std::size_t mapped_ = 0;  // pages of the runs mapped so far, from the first on
};

}  // namespace vtensor
