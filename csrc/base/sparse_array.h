// An array whose elements cost no memory until one near them is in use.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <vector>

namespace vtensor {

template <typename T>
class SparseArray {
 public:
  // What is not reserved is as T{}.
  const T& operator[](std::size_t i) const {
    const Chunk* const chunk = i / kChunk < chunks_.size() ? chunks_[i / kChunk].get() : nullptr;
    return chunk != nullptr ? (*chunk)[i % kChunk] : kAbsent;
  }
  // Requires: it is reserved.
  T& reserved(std::size_t i) { return (*chunks_[i / kChunk])[i % kChunk]; }

  // Makes the elements [begin, end) present, and their neighbours. Throws std::bad_alloc; every
  // element is as before then.
  void reserve(std::size_t begin, std::size_t end) {
    if (begin >= end) return;
    const std::size_t last = (end - 1) / kChunk;
    if (last >= chunks_.size()) chunks_.resize(last + 1);
    for (std::size_t i = begin / kChunk; i <= last; ++i)
      if (chunks_[i] == nullptr) chunks_[i] = std::make_unique<Chunk>();
  }

  // The first present element from i on; SIZE_MAX if there is none.
  std::size_t next(std::size_t i) const {
    std::size_t chunk = i / kChunk;
    if (chunk < chunks_.size() && chunks_[chunk] != nullptr) return i;
    while (++chunk < chunks_.size())
      if (chunks_[chunk] != nullptr) return chunk * kChunk;
    return SIZE_MAX;
  }

 private:
  static constexpr std::size_t kChunk = 64;  // elements
  static constexpr T kAbsent{};
  using Chunk = std::array<T, kChunk>;

  std::vector<std::unique_ptr<Chunk>> chunks_;
};

}  // namespace vtensor
