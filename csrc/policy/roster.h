// A list of clients that a client is put on and taken off in the same time however long it is, and
// without memory, so that neither can fail: each brings its place along.
#pragma once

#include <cstddef>
#include <iterator>
#include <memory>
#include <utility>

namespace vtensor {

class Client;

class Roster {
 public:
  // Belongs to a client, and serves for one roster at a time, which keeps the client alive.
  class Place {
   public:
    Place() = default;
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    bool taken() const { return client_ != nullptr; }

   private:
    friend class Roster;
    std::shared_ptr<Client> client_;
    Place* before_ = nullptr;
    Place* after_ = nullptr;
  };

  class Iterator {
   public:
    using iterator_category = std::forward_iterator_tag;
    using value_type = std::shared_ptr<Client>;
    using difference_type = std::ptrdiff_t;
    using pointer = const value_type*;
    using reference = const value_type&;

    Iterator() = default;
    explicit Iterator(const Place* at) : at_(at) {}
    reference operator*() const { return at_->client_; }
    Iterator& operator++() {
      at_ = at_->after_;
      return *this;
    }
    Iterator operator++(int) { return std::exchange(*this, Iterator(at_->after_)); }
    bool operator==(const Iterator&) const = default;

   private:
    const Place* at_ = nullptr;
  };

  Roster() = default;
  Roster(const Roster&) = delete;
  Roster& operator=(const Roster&) = delete;

  Iterator begin() const { return Iterator(first_); }
  Iterator end() const { return Iterator(nullptr); }
  bool empty() const { return first_ == nullptr; }
  std::size_t size() const { return size_; }
  const std::shared_ptr<Client>& front() const { return first_->client_; }

  // At the end. Requires: the place is free.
  void add(Place& place, std::shared_ptr<Client> client) noexcept {
    put(place, std::move(client), last_, nullptr);
  }
  // At the beginning. Requires: the place is free.
  void add_first(Place& place, std::shared_ptr<Client> client) noexcept {
    put(place, std::move(client), nullptr, first_);
  }
  // Returns the client; null where it was not on the list.
  std::shared_ptr<Client> remove(Place& place) noexcept {
    if (!place.taken()) return nullptr;
    (place.before_ == nullptr ? first_ : place.before_->after_) = place.after_;
    (place.after_ == nullptr ? last_ : place.after_->before_) = place.before_;
    --size_;
    return std::exchange(place.client_, nullptr);
  }

 private:
  void put(Place& place, std::shared_ptr<Client> client, Place* before, Place* after) noexcept {
    place.client_ = std::move(client);
    place.before_ = before;
    place.after_ = after;
    (before == nullptr ? first_ : before->after_) = &place;
    (after == nullptr ? last_ : after->before_) = &place;
    ++size_;
  }

  Place* first_ = nullptr;
  Place* last_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace vtensor
