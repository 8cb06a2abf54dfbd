// Increments a count for a scope.
#pragma once

#include <cstddef>

namespace vtensor {

class Counted {
 public:
  explicit Counted(std::size_t& count) : count_(count) { ++count_; }
  ~Counted() { --count_; }
  Counted& operator=(Counted&&) = delete;

 private:
  std::size_t& count_;
};

}  // namespace vtensor
