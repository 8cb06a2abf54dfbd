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

std::shared_ptr<Client> CachedClients::oldest_unplaced() const {
  const auto found = std::find_if(all_.begin(), all_.end(), [](const auto& client) VT_LOCKED {
    return client->hooks.cached_alike.linked() && !client->placed();
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

void CachedClients::add(const std::shared_ptr<Client>& client, std::size_t pages, bool unclean) {
  by_shape_[client->shape()].add_first(client->hooks.cached_alike, client);
  all_.add(client->hooks.cached, client);
  if (unclean) add_unclean(client);
  pages_ += pages;
}

void CachedClients::add_unclean(const std::shared_ptr<Client>& client) noexcept {
  if (!client->hooks.unclean.linked()) unclean.add(client->hooks.unclean, client);
}

void CachedClients::add_evictable(const std::shared_ptr<Client>& client) noexcept {
  all_.add(client->hooks.cached, client);
}

void CachedClients::remove(Client& client, std::size_t pages) {
  const std::shared_ptr<Client> kept = all_.remove(client.hooks.cached);
  if (!client.hooks.cached_alike.linked()) return;
  const auto alike = by_shape_.find(client.shape());
  alike->second.remove(client.hooks.cached_alike);
  if (alike->second.empty()) by_shape_.erase(alike);
  unclean.remove(client.hooks.unclean);
  pages_ -= pages;
}

}  // namespace vtensor
