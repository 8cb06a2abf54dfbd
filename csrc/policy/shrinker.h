// What keeps pages for later without being a client, as a KV cache keeps prefixes that no request
// uses. Its own operations give them up when they need memory; the mapper asks for them when other
// pools of a shared budget do.
#pragma once

#include <cstddef>
#include <optional>

namespace vtensor {

// The mapper calls it with no lock held. It waits for no operation.
class Shrinker {
 public:
  Shrinker() = default;
  virtual ~Shrinker() = default;
  Shrinker(const Shrinker&) = delete;
  Shrinker& operator=(const Shrinker&) = delete;

  // Gives up about `pages` pages and returns how many; nothing while an operation is under way.
  virtual std::optional<std::size_t> shrink(std::size_t pages) noexcept = 0;
  // Pages that it could give up; as last counted while an operation is under way.
  virtual std::size_t shrinkable() noexcept = 0;
};

}  // namespace vtensor
