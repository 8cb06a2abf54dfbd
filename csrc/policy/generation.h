// An immutable, published extent of mapped pages. A torch storage over it keeps it alive; the pool
// hears of its end from whatever thread drops that storage, and in the same way of the end of a
// client's owner.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/interval.h"
#include "policy/coverage.h"

namespace vtensor {

class Client;

struct Generation {
  std::shared_ptr<Client> client;
  Interval indices;            // the same in every row
  Interval bytes;              // of an arena, which need their pages until this ends
  std::size_t place = 0;       // among those of its client
  bool is_owner = false;       // stands for the owner, not for a storage
  bool is_lease = false;       // of a kernel that is about to be launched, not of a graph
  Generation* next = nullptr;  // in the pool's list of ended generations
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

}  // namespace vtensor
