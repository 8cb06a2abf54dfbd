// An immutable, published extent of mapped pages. A torch storage over it keeps it alive, and the
// thread that drops that storage ends it. A client's owner ends in the same way.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "base/interval.h"
#include "policy/coverage.h"
#include "vmm/pool_lock.h"

namespace vtensor {

class Client;

// What any thread ends, without a lock, and the holder of the pool's lock reaps.
class Ended {
 public:
  Ended() = default;
  virtual ~Ended() = default;
  Ended(const Ended&) = delete;
  Ended& operator=(const Ended&) = delete;

  // Gives back what it held. It is deleted afterwards, with the lock held.
  virtual void reap() noexcept VT_LOCKED = 0;

  Ended* next = nullptr;  // in the pool's list
};

struct Generation final : Ended {
  void reap() noexcept override VT_LOCKED;

  std::shared_ptr<Client> client;
  Interval indices;       // the same in every row
  Interval bytes;         // of an arena, which need their pages until this ends
  std::size_t place = 0;  // among those of its client
  bool is_owner = false;  // stands for the owner, not for a storage
  bool is_lease = false;  // of a kernel that is about to be launched, not of a graph
};

// The generations of one client that have not ended, in any order.
class Generations {
 public:
  bool empty() const { return all_.empty(); }
  auto begin() const { return all_.begin(); }
  auto end() const { return all_.end(); }
  // Which pages any of them covers.
  const Coverage& covered() const { return covered_; }

  // Throws std::bad_alloc; nothing is changed then.
  void add(Generation* generation) {
    generation->place = all_.size();
    all_.push_back(generation);
    try {
      covered_.add(generation->indices);
    } catch (...) {
      all_.pop_back();
      throw;
    }
  }
  void remove(const Generation* generation) noexcept {
    all_[generation->place] = all_.back();
    all_.back()->place = generation->place;
    all_.pop_back();
    covered_.remove(generation->indices);
  }

 private:
  std::vector<Generation*> all_;
  Coverage covered_;
};

// A stack of what has ended and is not reaped yet.
class EndedList {
 public:
  bool empty() const noexcept { return first_.load(std::memory_order_acquire) == nullptr; }
  void push(Ended* ended) noexcept {
    ended->next = first_.load(std::memory_order_relaxed);
    while (!first_.compare_exchange_weak(ended->next, ended, std::memory_order_acq_rel,
                                         std::memory_order_relaxed)) {
    }
  }
  // The first of them, linked by `next`.
  Ended* take_all() noexcept { return first_.exchange(nullptr, std::memory_order_acquire); }
  // Whether there are none, asked after the lock was let go, by changing none to none. So either
  // this sees what was pushed, or the thread that pushed it sees the lock free: with a plain load
  // both could look too early.
  bool confirm_empty() noexcept {
    Ended* none = nullptr;
    return first_.compare_exchange_strong(none, nullptr, std::memory_order_acq_rel,
                                          std::memory_order_acquire);
  }

 private:
  std::atomic<Ended*> first_{nullptr};
};

}  // namespace vtensor
