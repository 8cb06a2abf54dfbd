// Descriptors by which another process reads what an object of this one has.
#pragma once

#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "policy/client.h"

namespace vtensor::bind {

// Of the pool's memory, and of the shared file of each range.
using ReaderFiles = std::pair<int, std::vector<int>>;

// Requires: `clients` have shared their ranges, and are of one pool. Throws DriverError.
template <typename Clients>
ReaderFiles reader_files(const char* operation, const Clients& clients) {
  std::vector<Descriptor> ranges;
  std::vector<int> taken;
  for (const auto& client : clients)
    ranges.emplace_back(client->range().shared()->open_for_reader(operation));
  taken.reserve(ranges.size());
  const int memory = clients.front()->pool()->open_for_readers(operation);
  for (Descriptor& range : ranges) taken.push_back(range.take());
  return {memory, std::move(taken)};
}

}  // namespace vtensor::bind
