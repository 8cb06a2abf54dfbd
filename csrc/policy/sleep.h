// Clients without memory: their pages are unmapped and given back, while page tables, addresses,
// lengths and views stay, and come back later at the same addresses. What pages held is for the
// caller to keep: between the beginning and the end of falling asleep, and of waking, it is
// readable and writable at the addresses that `parts` names.
//
// Both are whole or nothing: without `finish` everything is as it was. Operations on the clients
// are refused from before the first to after the second; their callers see to that, by
// `Client::asleep`. Meanwhile no thread makes driver calls for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "driver/driver.h"
#include "policy/client.h"
#include "policy/page_pool.h"
#include "vmm/caller.h"
#include "vmm/page.h"

namespace vtensor {

// Bytes in memory, and their place among those of all pages that fall asleep together.
struct SleepPart {
  Address at;
  std::uint64_t sleep;  // the number
  std::size_t offset;
  std::size_t bytes;
};

// Clients that no other thread works on.
class HeldClients {
 public:
  using Clients = std::vector<std::shared_ptr<Client>>;

  HeldClients(const std::shared_ptr<PagePool>& pool, const Caller& caller)
      : pool_(pool), caller_(caller) {}
  ~HeldClients();
  HeldClients(const HeldClients&) = delete;
  HeldClients& operator=(const HeldClients&) = delete;

  const Clients& all() const { return clients_; }
  // Waits until none does. Throws TimedOut.
  void hold(PoolLock& lock, const Clients& clients) VT_LOCKED;
  void release() VT_LOCKED;

 private:
  const std::shared_ptr<PagePool> pool_;
  const Caller caller_;
  Clients clients_;
};

// Neighbouring pages of a client, and how they are mapped.
struct SleepRun {
  Client* client;
  Reservation::Run pages;
  Access access;  // that its entries say
  bool writable;  // mapped so, while it wakes
  std::vector<Handle> handles;
};

class FallAsleep {
 public:
  // Waits until no launched work may use the clients' pages, gives up what they have ahead of need
  // or cached, and gives what the kernel copied at writes a page of its own. Throws TimedOut,
  // OutOfPages, DriverError. Requires: their `asleep` is the number of a sleep, which need not be
  // the same: those of one number wake together.
  FallAsleep(const std::shared_ptr<PagePool>& pool, const Caller& caller,
             const HeldClients::Clients& clients);

  // What is to be kept: of a page with several mappings, one.
  const std::vector<SleepPart>& parts() const { return parts_; }
  // Unmaps the pages, and gives their memory back; returns how many. Pages that others have too, as
  // forks that are awake or in another sleep, stay. Throws DriverError; nothing has changed then.
  std::size_t finish();

 private:
  void await_work(PoolLock& lock) VT_LOCKED;
  void unshare_private_copies(PoolLock& lock) VT_LOCKED;

  const std::shared_ptr<PagePool> pool_;
  const Caller caller_;
  HeldClients held_;
  std::vector<SleepPart> parts_;
};

class WakeUp {
 public:
  // Gives the clients of these sleeps memory again, which shows zeros, and maps it writable. Throws
  // OutOfPages, DriverError, TimedOut.
  WakeUp(const std::shared_ptr<PagePool>& pool, const Caller& caller,
         std::span<const std::uint64_t> numbers);
  ~WakeUp();
  WakeUp(const WakeUp&) = delete;
  WakeUp& operator=(const WakeUp&) = delete;

  // Where what was kept is to be written.
  const std::vector<SleepPart>& parts() const { return parts_; }
  // The clients are as they were. Throws DriverError, TimedOut; they are asleep then.
  void finish();

 private:
  void collect() VT_LOCKED;
  void map(PoolLock& lock) VT_LOCKED;
  void zero() const;
  void await_copies(const char* what) const;
  // Back to sleep; all is given up if the driver does not unmap it, or copies to it do not end
  // (I8).
  void undo(PoolLock& lock) noexcept VT_LOCKED;
  // What is mapped is not known, or not to be unmapped: quarantined.
  void give_up() noexcept VT_LOCKED;

  const std::shared_ptr<PagePool> pool_;
  const Caller caller_;
  HeldClients held_;
  std::vector<Page*> pages_;  // each once
  std::vector<SleepRun> runs_;
  std::vector<SleepPart> parts_;
  std::vector<SleepPart> unclean_;                        // of these, what may show old bytes
  bool writable_mapped_ = false, shared_mapped_ = false;  // runs of either kind
};

}  // namespace vtensor
