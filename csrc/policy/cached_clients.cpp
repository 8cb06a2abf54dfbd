#include "policy/cached_clients.h"

#include <algorithm>

#include "policy/client.h"

namespace vtensor {

bool CachedClients::evict_oldest() {
  if (empty()) return false;
  const std::shared_ptr<Client> leaves_the_list = oldest();
  leaves_the_list->evict();
  return true;
}

void CachedClients::evict_all() {
  while (evict_oldest()) {
  }
}

std::shared_ptr<Client> CachedClients::oldest_counted() const {
  const auto found = std::find_if(all_.begin(), all_.end(), [](const auto& client) VT_LOCKED {
    return client->hooks.cached_alike.linked();
  });
  return found == all_.end() ? nullptr : *found;
}

std::shared_ptr<Client> CachedClients::find(const RowShape& shape) const {
  const auto alike = by_shape_.find(shape);
  if (alike == by_shape_.end()) return nullptr;
  std::shared_ptr<Client> busy;
  for (const std::shared_ptr<Client>& client : alike->second) {
    if (!client->reusable()) continue;
    if (!client->busy()) return client;
    if (!busy) busy = client;
  }
  return busy;
}

void CachedClients::add(const std::shared_ptr<Client>& client, bool by_shape) {
  if (by_shape) {
    by_shape_[client->shape()].add_first(client->hooks.cached_alike, client);
    pages_ += client->range().mapped(Why::cached);
  }
  all_.add(client->hooks.cached, client);
}

void CachedClients::add_unclean(const std::shared_ptr<Client>& client) noexcept {
  if (!client->hooks.unclean.linked()) unclean.add(client->hooks.unclean, client);
}

void CachedClients::remove(Client& client) {
  const std::shared_ptr<Client> kept = all_.remove(client.hooks.cached);
  unclean.remove(client.hooks.unclean);
  if (!client.hooks.cached_alike.linked()) return;
  const auto alike = by_shape_.find(client.shape());
  alike->second.remove(client.hooks.cached_alike);
  if (alike->second.empty()) by_shape_.erase(alike);
  pages_ -= client.range().mapped(Why::cached);
}

}  // namespace vtensor
