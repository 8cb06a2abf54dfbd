// An array whose elements cost no memory until one near them is in use.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace vtensor {

// Memory comes in chunks of `kChunk` elements.
template <typename T, std::size_t kChunk = 64>
class SparseArray {
 public:
  // An element that is not reserved reads as T{}.
  const T& operator[](std::size_t i) const {
    const Chunk* const chunk = i / kChunk < chunks_.size() ? chunks_[i / kChunk] : nullptr;
    return chunk != nullptr ? (*chunk)[i % kChunk] : kAbsent;
  }
  // Requires: element i is reserved.
  T& reserved(std::size_t i) { return (*chunks_[i / kChunk])[i % kChunk]; }

  // Prefetch in two steps: the pointer to the chunk of element i, then the element if present.
  void prefetch_place(std::size_t i) const {
    if (i / kChunk < chunks_.size())
      __builtin_prefetch(static_cast<const void*>(&chunks_[i / kChunk]));
  }
  void prefetch(std::size_t i) const {
    if (i / kChunk < chunks_.size() && chunks_[i / kChunk] != nullptr)
      __builtin_prefetch(&(*chunks_[i / kChunk])[i % kChunk], 1);
  }

  // Makes the elements [begin, end) present, and the rest of their chunks. Chunks of one call lie
  // side by side. Throws std::bad_alloc; every element is as before then.
  void reserve(std::size_t begin, std::size_t end) {
    if (begin >= end) return;
    const std::size_t last = (end - 1) / kChunk;
    if (last >= chunks_.size()) chunks_.resize(last + 1);
    for (std::size_t i = begin / kChunk; i <= last; ++i) {
      const std::size_t first = i;
      while (i <= last && chunks_[i] == nullptr) ++i;
      if (i == first) continue;
      blocks_.push_back(nullptr);
      blocks_.back() = std::make_unique<Chunk[]>(i - first);
      for (std::size_t n = first; n < i; ++n) chunks_[n] = &blocks_.back()[n - first];
    }
  }

  // The present elements from i on that lie side by side; none if i is absent.
  std::span<const T> together(std::size_t i) const {
    const Chunk* const chunk = i / kChunk < chunks_.size() ? chunks_[i / kChunk] : nullptr;
    return chunk != nullptr ? std::span(*chunk).subspan(i % kChunk) : std::span<const T>();
  }
  // Requires: i is reserved.
  std::span<T> together(std::size_t i) {
    return std::span(*chunks_[i / kChunk]).subspan(i % kChunk);
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
  static constexpr T kAbsent{};
  using Chunk = std::array<T, kChunk>;

  std::vector<Chunk*> chunks_;  // null: absent
  std::vector<std::unique_ptr<Chunk[]>> blocks_;
};

}  // namespace vtensor
