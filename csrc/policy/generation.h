// An immutable, published extent of mapped pages. A torch storage over it keeps it alive, and the
// thread that drops that storage ends it. A client's owner ends in the same way.
#pragma once

#include <cstddef>
#include <memory>

#include "base/interval.h"
#include "vmm/pool_lock.h"

namespace vtensor {

class Client;

// What any thread ends, without a lock, and takes effect under the pool's lock.
class Ended {
 public:
  virtual ~Ended() = default;
  Ended& operator=(Ended&&) = delete;

  // Gives back what it held. It is deleted afterwards, with the lock held.
  virtual void take_effect() noexcept VT_LOCKED = 0;

  Ended* next = nullptr;  // in the pool's list
};

struct Generation final : Ended {
  void take_effect() noexcept override VT_LOCKED;

  std::shared_ptr<Client> client;
  Interval indices;       // the same in every row
  Interval bytes;         // of an arena; their pages stay in use until this ends
  std::size_t place = 0;  // in its client's list
  bool is_owner = false;  // stands for the owner, not for a storage
  bool is_lease = false;  // of a kernel that is about to be launched, not of a graph
};

}  // namespace vtensor
