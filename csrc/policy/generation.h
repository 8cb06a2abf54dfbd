// An immutable, published extent of mapped pages. A torch storage keeps its generation alive, and
// the thread that drops the storage ends the generation. A client's owner ends by a Generation too.
#pragma once

#include <cstddef>
#include <memory>

#include "base/interval.h"
#include "vmm/pool_lock.h"

namespace vtensor {

class Client;

// An object that any thread ends without a lock, and whose end takes effect under the pool's lock.
class Ended {
 public:
  virtual ~Ended() = default;
  Ended& operator=(Ended&&) = delete;

  // Gives back what the object held. The object is deleted afterwards, with the lock held.
  virtual void take_effect() noexcept VT_LOCKED = 0;

  Ended* next = nullptr;  // in the pool's list
};

struct Generation final : Ended {
  void take_effect() noexcept override VT_LOCKED;

  std::shared_ptr<Client> client;
  Interval indices;       // the same in every row
  Interval bytes;         // arenas: bytes whose pages have a use until this ends
  std::size_t place = 0;  // index in Client::generations_
  bool is_owner = false;  // stands for the owner, not for a storage
  bool is_lease = false;  // for a kernel that is about to be launched, not for a graph
};

}  // namespace vtensor
