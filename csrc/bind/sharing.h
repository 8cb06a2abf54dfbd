// Descriptors by which another process reads what an object of this one has.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "bind/released_gil.h"
#include "policy/client.h"

namespace vtensor::bind {

// Of each range: its shared file, and the memory. Closed unless taken.
class ReaderFiles {
 public:
  using Pair = std::pair<int, int>;

  ReaderFiles() = default;
  ~ReaderFiles() {
    for (const auto& [range, memory] : files_) {
      if (range >= 0) close(range);
      if (memory >= 0) close(memory);
    }
  }
  ReaderFiles(const ReaderFiles&) = delete;
  ReaderFiles& operator=(const ReaderFiles&) = delete;

  // Adds those of a range that is shared. Throws InvalidArgument if its pool is not shareable,
  // DriverError.
  void add(const char* operation, Client& client) {
    files_.emplace_back(-1, -1);
    files_.back().second = client.pool()->driver().open_memory(operation);
    files_.back().first = client.range().shared()->open_for_reader(operation);
  }
  Pair at(std::size_t i) const { return files_[i]; }
  std::vector<Pair> take() { return std::exchange(files_, {}); }

 private:
  std::vector<Pair> files_;
};

}  // namespace vtensor::bind
