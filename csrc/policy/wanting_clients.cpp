#include "policy/wanting_clients.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "policy/client.h"

namespace vtensor {

using std::chrono::steady_clock;

void WantingClients::add(const std::shared_ptr<Client>& client) {
  if (!client->hooks.wanting.linked()) all_.add(client->hooks.wanting, client);
}

void WantingClients::remove(Client& client) noexcept {
  all_.remove(client.hooks.wanting);
  took(client, client.hooks.announced);
  if (all_.empty()) since_.reset();
}

void WantingClients::announce(Client& client, std::size_t pages) noexcept {
  took(client, client.hooks.announced);
  client.hooks.announced = pages;
  announced_ += pages;
}

void WantingClients::took(Client& client, std::size_t pages) noexcept {
  pages = std::min(pages, client.hooks.announced);
  client.hooks.announced -= pages;
  announced_ -= pages;
}

void WantingClients::requeue(Client& client) noexcept {
  if (const auto kept = all_.remove(client.hooks.wanting)) all_.add(client.hooks.wanting, kept);
}

void WantingClients::served(Client& client) noexcept {
  const auto since = since_;
  remove(client);
  if (!all_.empty()) return;
  const bool ignored = std::exchange(ignored_, false);
  if (since && !ignored)
    horizon_.served(static_cast<std::uint64_t>((steady_clock::now() - *since).count()));
}

void WantingClients::measure() noexcept {
  if (!since_) since_ = steady_clock::now();
}

}  // namespace vtensor
