// Descriptors by which another process reads what an object of this one has.
#pragma once

#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "policy/client.h"

namespace vtensor::bind {

// Descriptors of the pool's memory, and of the shared file of each range. They are closed with this
// object: Python may be interrupted before it has used them (I17).
class ReaderFiles {
 public:
  ReaderFiles() = default;
  ReaderFiles(ReaderFiles&&) = default;
  ReaderFiles& operator=(ReaderFiles&&) = default;
  void take(Descriptor descriptor) { all_.push_back(std::move(descriptor)); }
  std::vector<int> descriptors() const {
    std::vector<int> all;
    for (const Descriptor& one : all_) all.push_back(one.get());
    return all;
  }
  std::vector<Descriptor> release() { return std::exchange(all_, {}); }

 private:
  std::vector<Descriptor> all_;
};

// Requires: `clients` have shared their ranges, and are of one pool. Throws DriverError.
template <typename Clients>
ReaderFiles reader_files(const char* operation, const Clients& clients) {
  ReaderFiles files;
  files.take(clients.front()->pool()->open_for_readers(operation));
  for (const auto& client : clients)
    files.take(client->range().shared()->open_for_reader(operation));
  return files;
}

}  // namespace vtensor::bind
