// Clients with cached pages: freed buffers, for the next tensor of their shape, and arenas.
#pragma once

#include <cstddef>
#include <map>
#include <memory>

#include "policy/client_list.h"
#include "vmm/pool_lock.h"
#include "vmm/reservation.h"

namespace vtensor {

class Client;

class CachedClients {
 public:
  bool empty() const { return all_.empty(); }
  // Has the oldest give up cached pages; false if there is none.
  bool evict_oldest() VT_LOCKED;
  void evict_all() VT_LOCKED;
  const std::shared_ptr<Client>& oldest() const { return all_.front(); }
  // The oldest first.
  ClientList::Iterator begin() const { return all_.begin(); }
  ClientList::Iterator end() const { return all_.end(); }
  // Cached pages that count against the pool's `cache` limit: of clients that are found by shape.
  std::size_t pages() const { return pages_; }
  // The oldest of these; null if there is none.
  std::shared_ptr<Client> oldest_counted() const VT_LOCKED;
  // The last freed client of exactly this shape that can be reused, preferably one that is not
  // busy; null if there is none.
  std::shared_ptr<Client> find(const RowShape& shape) const VT_LOCKED;

  // Adds a client with cached pages; `by_shape`: `find` finds it. Throws only if it does.
  void add(const std::shared_ptr<Client>& client, bool by_shape) VT_LOCKED;
  // Requires: it has its cached pages still.
  void remove(Client& client) VT_LOCKED;

  // Adds a client, cached or owned, with pages to be zeroed. Does nothing if it is listed.
  void add_unclean(const std::shared_ptr<Client>& client) noexcept VT_LOCKED;

  // Clients with pages to be zeroed.
  ClientList unclean;

 private:
  ClientList all_;                           // oldest first
  std::map<RowShape, ClientList> by_shape_;  // newest first
  std::size_t pages_ = 0;
};

}  // namespace vtensor
