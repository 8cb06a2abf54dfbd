// What keeps pages for later without being a client, as the prefixes of a KV cache that no request
// uses. Its own operations give them up when they need memory; other pools of a shared budget ask
// for them here.
#pragma once

#include <cstddef>
#include <optional>

namespace vtensor {

class Keeper {
 public:
  Keeper() = default;
  virtual ~Keeper() = default;
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  // Both are called by the mapper, with no lock held, and wait for no operation.

  // Gives up about `pages` pages and returns how many; nothing while an operation is under way.
  virtual std::optional<std::size_t> give_up(std::size_t pages) noexcept = 0;
  // Pages that it could give up; as last known while an operation is under way.
  virtual std::size_t kept() noexcept = 0;
};

}  // namespace vtensor
