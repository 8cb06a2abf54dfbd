// Clients that want pages ahead of need, the next to be served first, and how long that takes.
#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include "policy/client_list.h"
#include "policy/look_ahead.h"
#include "vmm/pool_lock.h"

namespace vtensor {

class WantingClients {
 public:
  bool empty() const { return all_.empty(); }
  std::size_t size() const { return all_.size(); }
  ClientList::Iterator begin() const { return all_.begin(); }
  ClientList::Iterator end() const { return all_.end(); }

  // Nothing if it is listed.
  void add(const std::shared_ptr<Client>& client) VT_LOCKED;
  void remove(Client& client) noexcept VT_LOCKED;
  // Keeps `pages` free pages for a listed client until it leaves the list: clients that only look
  // ahead get what is left beside them. `took`: it has taken some of them.
  void announce(Client& client, std::size_t pages) noexcept VT_LOCKED;
  void took(Client& client, std::size_t pages) noexcept VT_LOCKED;
  // Pages kept for all of them.
  std::size_t announced() const { return announced_; }

  // Moves it to the end of the list.
  void requeue(Client& client) noexcept VT_LOCKED;
  // All that it wanted is ready.
  void served(Client& client) noexcept VT_LOCKED;

  // Measures how long the mapper needs for the current requests, from now on. Ignores explicit
  // prepare() calls, after ignore(): their size says nothing about the rate.
  void measure() noexcept;
  void ignore() noexcept { ignored_ = true; }
  Horizon horizon() const { return horizon_; }

 private:
  ClientList all_;
  std::size_t announced_ = 0;  // pages
  std::optional<std::chrono::steady_clock::time_point> since_;
  bool ignored_ = false;
  Horizon horizon_;
};

}  // namespace vtensor
