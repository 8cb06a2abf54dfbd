// The prefix index against a plain model: what it knows, what it gives up for want of memory, and
// in which order.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpp/slot_cache_bench.h"
#include "kv/prefix_index.h"
#include "tensor/buffer.h"

namespace vtensor {
namespace {

using slots::kCaller;
using slots::kPage;
using Tokens = std::vector<Token>;

std::shared_ptr<PagePool> open_pool() { return slots::Bench<slots::OnHost>::open(2'000, {}); }

// Of each unit, what the index should know: a unit is its salt and all tokens up to its end.
class Model {
 public:
  using Key = std::pair<std::string, Tokens>;

  explicit Model(std::size_t unit) : unit_(unit) {}

  std::size_t size() const { return units_.size(); }
  std::size_t known(const Tokens& tokens, const std::string& salt) const {
    std::size_t units = 0;
    while ((units + 1) * unit_ <= tokens.size() && units_.contains(key(tokens, salt, units + 1)))
      ++units;
    return units;
  }
  // The units of a path are used now, the deepest first.
  void use(const Tokens& tokens, const std::string& salt, std::size_t units) {
    for (std::size_t i = units; i != 0; --i) units_[key(tokens, salt, i)] = ++now_;
  }
  // Units are a page each. `in_use`: those that may not go.
  std::vector<Key> evict(std::size_t pages, const std::vector<Key>& in_use) {
    std::vector<Key> gone;
    while (gone.size() < pages) {
      const Key* oldest = nullptr;
      for (const auto& [unit, used] : units_) {
        const bool needed = std::find(in_use.begin(), in_use.end(), unit) != in_use.end();
        if (needed || has_children(unit)) continue;
        if (oldest == nullptr || used < units_.at(*oldest)) oldest = &unit;
      }
      if (oldest == nullptr) break;
      gone.push_back(*oldest);
      units_.erase(gone.back());
    }
    return gone;
  }
  Key key(const Tokens& tokens, const std::string& salt, std::size_t units) const {
    return {salt, {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(units * unit_)}};
  }

 private:
  bool has_children(const Key& unit) const {
    const auto next = units_.upper_bound(unit);
    if (next == units_.end() || next->first.first != unit.first) return false;
    const Tokens& tokens = next->first.second;
    return tokens.size() > unit.second.size() &&
           std::equal(unit.second.begin(), unit.second.end(), tokens.begin());
  }

  const std::size_t unit_;
  std::map<Key, std::uint64_t> units_;
  std::uint64_t now_ = 0;
};

// Pages of their own for so many units, and the buffer that has them mapped.
struct Units {
  Units(const std::shared_ptr<PagePool>& pool, std::size_t units)
      : buffer(Buffer::create(pool, {1, kPage, units}, kCaller)) {
    buffer->grow(kCaller, {0, units}, false);
    std::vector<Interval> each;
    for (std::size_t i = 0; i < units; ++i) each.push_back({i, i + 1});
    for (std::shared_ptr<PageSet>& page_set : buffer->offer(kCaller, each))
      prefixes.push_back({std::move(page_set)});
  }
  std::shared_ptr<Buffer> buffer;
  std::vector<Prefix> prefixes;
};

}  // namespace

TEST_CASE("random prompts, against a plain model") {
  for (unsigned seed = 1; seed <= 3; ++seed) {
    CAPTURE(seed);
    const std::size_t unit = 1 + seed % 3;
    std::mt19937 random(seed);
    const auto pick = [&random](std::size_t n) { return random() % n; };
    const auto pool = open_pool();
    PrefixIndex index(unit);
    Model model(unit);
    std::size_t evictions = 0;
    // Pages that some slot still has mapped.
    std::vector<std::pair<std::shared_ptr<Buffer>, std::vector<Model::Key>>> mapped;
    const auto in_use = [&] {
      std::vector<Model::Key> keys;
      for (const auto& [buffer, units] : mapped)
        keys.insert(keys.end(), units.begin(), units.end());
      return keys;
    };
    const auto unmap = [&](std::size_t i) {
      mapped[i].first->abandon();
      mapped.erase(mapped.begin() + static_cast<std::ptrdiff_t>(i));
    };
    for (int i = 0; i < 400; ++i) {
      CAPTURE(i);
      Tokens tokens(pick(8 * unit + unit));
      for (Token& token : tokens) token = static_cast<Token>(pick(2)) - (pick(9) == 0);
      const std::string salt = pick(4) == 0 ? "salt" : "";
      const std::size_t known = model.known(tokens, salt);
      REQUIRE(index.known(tokens, salt) == known);
      switch (pick(5)) {
        case 0:
        case 1: {  // one that is computed anew
          const std::size_t units = tokens.size() / unit;
          if (units == known) {
            index.add(tokens, salt, known, {});
          } else {
            Units added(pool, units - known);
            index.add(tokens, salt, known, std::move(added.prefixes));
            std::vector<Model::Key> keys;
            for (std::size_t k = known; k < units; ++k)
              keys.push_back(model.key(tokens, salt, k + 1));
            mapped.emplace_back(std::move(added.buffer), std::move(keys));
            if (pick(3) != 0) unmap(mapped.size() - 1);
          }
          model.use(tokens, salt, units);
          break;
        }
        case 2: {  // one that begins with what is known
          const std::size_t most = pick(known + 2);
          const auto found = index.take(tokens, salt, most);
          REQUIRE(found.size() == std::min(known, most));
          model.use(tokens, salt, found.size());
          break;
        }
        case 3: {  // memory is short
          const std::size_t pages = pick(6);
          const std::size_t before = pool->counts().in_page_sets;
          const auto gone = model.evict(pages, in_use());
          REQUIRE(index.evict(pages) == gone.size());
          REQUIRE(pool->counts().in_page_sets == before - gone.size());
          for (const auto& [gone_salt, of] : gone)
            CHECK(index.known(of, gone_salt) == model.known(of, gone_salt));
          evictions += gone.size();
          break;
        }
        default:
          if (!mapped.empty()) unmap(pick(mapped.size()));
      }
      REQUIRE(index.size() == model.size());
      REQUIRE(index.evictions() == evictions);
      REQUIRE(pool->counts().in_page_sets == model.size());
    }
    CHECK(evictions > 50);
    while (!mapped.empty()) unmap(0);
    pool->trim();
    CHECK(pool->counts().used == model.size());  // a page each, and kept by nothing else
    index.clear();
    CHECK(index.size() == 0);
    pool->trim();
    CHECK(pool->counts().used == 0);
    CHECK_NOTHROW(pool->check_invariants());
  }
}

TEST_CASE("a unit stays as long as one behind it is in use") {
  const auto pool = open_pool();
  PrefixIndex index(1);
  const Tokens tokens{1, 2};
  Units units(pool, 2);
  index.add(tokens, "", 0, std::move(units.prefixes));
  units.buffer->shrink_to({1, 2});  // as behind a window
  CHECK(index.evict(2) == 0);
  CHECK(index.known(tokens, "") == 2);
  units.buffer->abandon();
  CHECK(index.evict(2) == 2);
}

TEST_CASE("page sets end in a scope that has the lock") {
  const auto pool = open_pool();
  Units units(pool, 3);
  {
    PoolLock lock(pool);
    CHECK(pool->store().in_page_sets() == 3);
    units.prefixes.clear();
    pool->drain_ended();
    CHECK(pool->store().in_page_sets() == 0);
  }
  Units more(pool, 2);
  {
    const PoolLock lock(pool);
    more.prefixes.clear();
  }
  CHECK(pool->counts().in_page_sets == 0);
  for (const Units* some : {&units, &more}) some->buffer->abandon();
}

TEST_CASE("very long prompts are added, found, given up and forgotten") {
  constexpr std::size_t kUnits = 50'000;
  const auto pool = open_pool();
  // Nodes need no pages for this.
  const auto nothing = std::make_shared<PageSet>(pool, Interval{}, std::vector<Page*>{});
  Tokens tokens(kUnits);
  std::iota(tokens.begin(), tokens.end(), Token{0});
  for (const bool given_up : {true, false}) {
    PrefixIndex index(1);
    index.add(tokens, "", 0, std::vector<Prefix>(kUnits, Prefix{nothing}));
    CHECK(index.size() == kUnits);
    CHECK(index.known(tokens, "") == kUnits);
    Tokens other = tokens;
    other[kUnits / 2] = -1;
    CHECK(index.known(other, "") == kUnits / 2);
    index.add(other, "", kUnits / 2, std::vector<Prefix>(kUnits / 2, Prefix{nothing}));
    CHECK(index.take(tokens, "", kUnits).size() == kUnits);
    if (given_up) {
      CHECK(index.evict(1) == 0);  // there is no page in it, so all of it goes
      CHECK(index.size() == 0);
      CHECK(index.evictions() == kUnits + kUnits / 2);
    }
  }
}

}  // namespace vtensor
