// Descriptors by which another process reads what an object of this one has.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "policy/client.h"

namespace vtensor::bind {

// Of each range: its shared file, and the memory. Closed unless taken.
class ReaderFiles {
 public:
  using Pair = std::pair<int, int>;

  // Adds those of a range that is shared. Throws InvalidArgument if its pool is not shareable,
  // DriverError.
  void add(const char* operation, Client& client) {
    Descriptor memory(client.pool()->driver().open_memory(operation));
    Descriptor range(client.range().shared()->open_for_reader(operation));
    files_.emplace_back(std::move(range), std::move(memory));
  }
  std::vector<Pair> take() {
    std::vector<Pair> taken;
    taken.reserve(files_.size());
    for (auto& [range, memory] : files_) taken.emplace_back(range.take(), memory.take());
    return taken;
  }

 private:
  std::vector<std::pair<Descriptor, Descriptor>> files_;
};

}  // namespace vtensor::bind
