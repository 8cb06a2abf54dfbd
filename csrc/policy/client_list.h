// A list of clients. Joining and leaving take constant time and cannot fail: each client has the
// list's node, as a hook.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <utility>

namespace vtensor {

class Client;

class ClientList {
  using List = std::list<std::shared_ptr<Client>>;

 public:
  using Iterator = List::const_iterator;

  // Belongs to a client, and links it into one list at a time; the list keeps the client alive.
  class Hook {
   public:
    Hook& operator=(Hook&&) = delete;
    bool linked() const { return unlinked_.empty(); }

   private:
    friend class ClientList;
    List unlinked_{1};  // the node, unless it is in a list
    const List::iterator node_ = unlinked_.begin();
  };

  Iterator begin() const { return all_.begin(); }
  Iterator end() const { return all_.end(); }
  bool empty() const { return all_.empty(); }
  std::size_t size() const { return all_.size(); }
  const std::shared_ptr<Client>& front() const { return all_.front(); }

  // Adds at the end. Requires: the hook is not linked.
  void add(Hook& hook, std::shared_ptr<Client> client) noexcept {
    link(hook, std::move(client), all_.end());
  }
  // Adds at the beginning. Requires: the hook is not linked.
  void add_first(Hook& hook, std::shared_ptr<Client> client) noexcept {
    link(hook, std::move(client), all_.begin());
  }
  // Moves the client to the end, if it is in the list.
  void move_last(Hook& hook) noexcept {
    if (hook.linked()) all_.splice(all_.end(), all_, hook.node_);
  }
  // Returns the client; null if it is not in the list.
  std::shared_ptr<Client> remove(Hook& hook) noexcept {
    if (!hook.linked()) return nullptr;
    hook.unlinked_.splice(hook.unlinked_.end(), all_, hook.node_);
    return std::exchange(*hook.node_, nullptr);
  }

 private:
  void link(Hook& hook, std::shared_ptr<Client> client, Iterator before) noexcept {
    *hook.node_ = std::move(client);
    all_.splice(before, hook.unlinked_);
  }

  List all_;
};

}  // namespace vtensor
