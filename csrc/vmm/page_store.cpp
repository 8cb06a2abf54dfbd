#include "vmm/page_store.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "base/align.h"
#include "base/errors.h"
#include "vmm/page_table.h"

namespace vtensor {

using std::chrono::steady_clock;

namespace {

// How many pages from the first on have adjacent handles: one call destroys them.
std::size_t adjacent(const Driver& driver, std::span<Page* const> pages) {
  if (!driver.traits().adjacent_handles) return 1;
  std::size_t n = 1;
  while (n < pages.size() && pages[n]->handle == pages[0]->handle + n) ++n;
  return n;
}

}  // namespace

PageStore::PageStore(Driver& driver, const PoolOptions& options, Ledger* ledger,
                     std::function<void()> when_due)
    : driver_(driver),
      options_(options),
      ledger_(ledger),
      when_due_(std::move(when_due)),
      budget_(in_pages(options.budget)),
      most_spare_(in_pages(options.spare)),
      placement_(driver) {}

PageStore::~PageStore() {
  try {
    if (!broken()) empty_oldest(nullptr, spare());
  } catch (...) {
    // The end of the driver frees what it refused to free here.
  }
}

std::size_t PageStore::left(std::size_t private_copies) const {
  const std::size_t taken = in_use() + under_way_ - std::min(private_copies, private_copies_);
  return sub_sat(budget(), taken);
}

std::size_t PageStore::unused(std::size_t private_copies) const {
  const std::size_t own = left(private_copies);
  if (ledger_ == nullptr) return own;
  return std::min(own, charged_unused() + in_pages(ledger_->balance().room));
}

std::size_t PageStore::available() const {
  std::size_t pages = std::min(left(), beside_reserve());
  if (ledger_ != nullptr) {
    const Ledger::Balance balance = ledger_->balance();
    const std::size_t room = sub_sat(balance.room, balance.wanted_elsewhere);
    pages = std::min(pages, charged_unused() + in_pages(room));
  }
  return pages;
}

std::size_t PageStore::charge_available(std::size_t pages) {
  pages = std::min(pages, available());
  return charge(pages) ? pages : std::min(pages, charged_unused());
}

std::size_t PageStore::charged() const { return in_pages(ledger_->held()); }

std::size_t PageStore::to_charge(std::size_t taken, std::size_t spare) const {
  return used_ + private_copies_ + under_way_ + taken + std::max(spare, promised_);
}

std::size_t PageStore::charged_unused() const { return sub_sat(charged(), to_charge(0, 0)); }

std::size_t PageStore::bytes_to_charge(std::size_t pages) const {
  if (ledger_ == nullptr) return 0;
  return sub_sat(to_charge(pages, 0), charged()) * driver_.traits().page_size;
}

bool PageStore::charge(std::size_t pages, std::size_t spare) {
  if (ledger_ == nullptr) return true;
  const std::size_t needed = to_charge(pages, spare);
  return needed <= charged() || ledger_->charge(needed * driver_.traits().page_size);
}

void PageStore::give_back_charge() noexcept {
  if (ledger_ == nullptr) return;
  const std::size_t needed = to_charge(0, spare());
  if (charged() > needed) ledger_->hold(needed * driver_.traits().page_size);
}

// The kernel does not ask before it copies. So private copies, and nothing else, may exceed a
// shared budget, as they may the pool's own.
void PageStore::set_private_copies(std::size_t pages) {
  private_copies_ = pages;
  if (ledger_ == nullptr) return;
  const std::size_t needed = to_charge(0, spare());
  if (needed > charged()) ledger_->hold(needed * driver_.traits().page_size);
}

void PageStore::promise(std::ptrdiff_t pages) {
  promised_ += static_cast<std::size_t>(pages);
  look_for_excess();
}

std::size_t PageStore::beside_reserve() const {
  if (options_.device_reserve == 0) return budget();
  return releasable() + in_pages(sub_sat(driver_.free_memory(), options_.device_reserve));
}

void PageStore::break_down(const std::exception_ptr& cause) noexcept {
  if (is_broken_.load(std::memory_order_relaxed)) return;
  const auto said = [&cause](const std::string& call, long code, const std::string& name,
                             const char* what) {
    try {
      return std::make_exception_ptr(
          DriverError(call, code, name,
                      "[Pool] the pool is broken, because a change of its mappings could not be "
                      "undone (",
                      what,
                      "), and maps and unmaps nothing more: copy what you need from views, which "
                      "stay readable, close the pool and make another"));
    } catch (const std::bad_alloc&) {
      return cause;
    }
  };
  try {
    std::rethrow_exception(cause);
  } catch (const DriverError& refused) {
    broken_ = said(refused.call, refused.code, refused.name, refused.what());
  } catch (const std::exception& other) {
    broken_ = said("", 0, "", other.what());
  }
  is_broken_.store(true, std::memory_order_release);
}

bool PageStore::make_ready(PoolLock& lock, std::size_t pages) {
  pages = std::min(pages, left());
  if (driver_.traits().adjacent_handles || releasable() >= pages) return false;
  if (!charge(pages)) return false;
  const std::size_t missing = pages - releasable();
  std::vector<Page*> fresh;  // in no list, so no other thread finds them
  std::size_t made = 0;
  std::exception_ptr error;
  under_way_ += missing;
  try {
    fresh.reserve(missing);
    while (fresh.size() < missing) fresh.push_back(placement_.blank());
    const Unlocked unlocked(lock);
    for (; made < missing; ++made) fresh[made]->handle = driver_.create(1);
  } catch (...) {
    error = std::current_exception();
  }
  under_way_ -= missing;
  for (std::size_t i = 0; i < fresh.size(); ++i) {
    fresh[i]->resident = i < made;
    placement_.put_back(fresh[i]);
  }
  look_for_excess();
  if (error) std::rethrow_exception(error);
  return true;
}

void PageStore::take(RowHome& home, const Page* previous, std::size_t n, bool stitched,
                     std::vector<Page*>& out) {
  raise_if_broken();
  const std::size_t begin = out.size();
  try {
    // If handles are made one by one, placement_ makes one for each page that is not spare.
    if (!driver_.traits().adjacent_handles && n > spare()) require_charge(n, 0);
    const std::size_t fresh = sub_sat(budget(), used_ + private_copies_ + spare());
    out.reserve(begin + n);
    placement_.pick(home, previous, n, stitched ? fresh : SIZE_MAX, out);
    std::size_t empty = 0;
    for (std::size_t i = begin; i < out.size(); ++i) empty += !out[i]->resident;
    make_room(n, empty);
  } catch (...) {
    for (std::size_t i = begin; i < out.size(); ++i) placement_.put_back(out[i]);
    out.resize(begin);
    throw;
  }
  std::size_t made = 0;
  for (Page* const page : std::span(out).subspan(begin)) {
    made += page->fresh || !page->resident;
    page->fresh = false;
    page->resident = true;
  }
  pages_fresh += made;
  pages_recycled += n - made;
  used_ += n;
}

// Gives back spare memory until the budget has room for `taken` more pages, of which `fresh` have
// no memory yet.
void PageStore::make_room(std::size_t taken, std::size_t fresh) {
  if (fresh == 0) return;
  const std::size_t most = sub_sat(budget(), used_ + private_copies_ + taken);
  if (spare() > most) empty_oldest(nullptr, spare() - most);
  // Kept memory is charged too, and must go if other pools have taken all else, or if the budget's
  // file cannot be asked: asking again would take as long again.
  for (bool answered = true; answered && spare() != 0;) {
    std::size_t room = 0;
    try {
      if (charge(taken, spare())) return;
      room = in_pages(ledger_->balance().room);
    } catch (const Error&) {
      answered = false;
    }
    const std::size_t over = sub_sat(to_charge(taken, spare()), charged() + room);
    empty_oldest(nullptr, std::clamp<std::size_t>(over, 1, spare()));
  }
  require_charge(taken, spare());
}

void PageStore::require_charge(std::size_t taken, std::size_t spare) {
  if (charge(taken, spare)) return;
  throw OutOfPages("[", ledger_->name(), "] need ", taken, " pages of ", driver_.traits().page_size,
                   " bytes, other pools of this shared budget took them meanwhile: try again");
}

void PageStore::empty_oldest(PoolLock* lock, std::size_t n) {
  raise_if_broken();
  std::vector<Page*> leaving;  // have a reference meanwhile, so that no other thread takes them
  leaving.reserve(n);
  for (; n != 0; --n) {
    leaving.push_back(placement_.spare().oldest());
    placement_.take_spare(leaving.back());
  }
  std::sort(leaving.begin(), leaving.end(),
            [](const Page* a, const Page* b) { return a->handle < b->handle; });
  std::size_t gone = 0;
  std::exception_ptr error;
  under_way_ += leaving.size();
  try {
    std::optional<Unlocked> unlocked;
    if (lock != nullptr) unlocked.emplace(*lock);
    while (gone < leaving.size()) {
      const std::size_t some = adjacent(driver_, std::span(leaving).subspan(gone));
      driver_.destroy(leaving[gone]->handle, some);
      gone += some;
    }
  } catch (...) {
    error = std::current_exception();
  }
  under_way_ -= leaving.size();
  for (std::size_t i = 0; i < leaving.size(); ++i) {
    if (i < gone) leaving[i]->resident = leaving[i]->dirty = false;
    placement_.put_back(leaving[i]);
  }
  if (error) std::rethrow_exception(error);
}

std::size_t PageStore::sleep(PoolLock& lock, std::span<Page* const> pages) noexcept {
  std::size_t gone = 0;
  {
    const Unlocked unlocked(lock);
    for (std::size_t i = 0, n = 0; i < pages.size(); i += n) {
      n = adjacent(driver_, pages.subspan(i));
      bool keeps = false;
      try {
        driver_.destroy(pages[i]->handle, n);
        gone += n;
      } catch (...) {
        keeps = true;
      }
      for (std::size_t k = i; k < i + n; ++k) pages[k]->resident = pages[k]->stale = keeps;
    }
  }
  for (Page* page : pages) {
    asleep_ += !page->asleep;
    page->asleep = true;
  }
  used_ -= gone;
  without_memory_ += gone;
  return gone;
}

void PageStore::wake(std::span<Page* const> pages) {
  raise_if_broken();
  std::vector<Page*> empty;
  for (Page* page : pages) {
    if (!page->resident) empty.push_back(page);
  }
  if (driver_.traits().adjacent_handles) {
    make_room(empty.size(), empty.size());
    used_ += empty.size();
  } else {
    std::vector<Page*> fresh;
    RowHome none;
    take(none, nullptr, empty.size(), false, fresh);
    for (std::size_t i = 0; i < empty.size(); ++i) {
      empty[i]->handle = fresh[i]->handle;
      empty[i]->stale = fresh[i]->dirty;
      fresh[i]->resident = false;
      placement_.put_back(fresh[i]);
    }
  }
  for (Page* page : empty) page->resident = true;
  without_memory_ -= empty.size();
}

void PageStore::woken(std::span<Page* const> pages) {
  for (Page* page : pages) page->asleep = false;
  asleep_ -= pages.size();
}

void PageStore::drop(Page* page) noexcept {
  if (--page->references != 0) return;
  asleep_ -= std::exchange(page->asleep, false);
  --(page->resident ? used_ : without_memory_);
  page->dirty = page->resident;
  placement_.put_back(page);
  look_for_excess();
}

steady_clock::time_point PageStore::release_excess(PoolLock& lock) {
  excess_due_ = false;
  try {
    if (has_excess()) release(lock, 1);  // one at a time: callers may wait for the lock
  } catch (const Error&) {
    return steady_clock::now() + std::chrono::seconds(1);  // the driver refused: tries again later
  }
  excess_due_ = has_excess();
  return excess_due_ ? steady_clock::now() : steady_clock::time_point::max();
}

void PageStore::check(const std::unordered_map<const Page*, PageUse>& uses) const {
  std::size_t extra = 0, asleep = 0, without_memory = 0;
  for (const auto& [page, use] : uses) {
    asleep += page->asleep;
    without_memory += !page->resident;
    const std::string name = text("page ", page->handle);
    if (page->references < use.entries) {
      throw Error("I5: ", name, " has ", use.entries, " page table entries and counts ",
                  page->references);
    }
    extra += page->references - use.entries;
    if (use.writable && use.reachable > 1) throw Error("I6: ", name, " is shared and writable");
  }
  // Only page sets may have a page that sleeps, and `uses` then lacks it.
  const auto differs = [&](std::size_t counted, std::size_t found)
                           VT_LOCKED { return found > counted || counted - found > in_page_sets_; };
  if (differs(asleep_, asleep) || differs(without_memory_, without_memory)) {
    throw Error("I5: ", asleep_, " pages are counted asleep, ", without_memory_,
                " of them without memory; page tables hold ", asleep, " and ", without_memory);
  }
  if (extra > in_page_sets_) throw Error("I5: a page counts more references than it has");
  const std::size_t known = used_ + without_memory_;
  if (uses.size() > known || known - uses.size() > in_page_sets_) {
    throw Error("I5: ", used_, " pages are counted used, page tables hold ", uses.size());
  }
  for (const Page* page = placement_.spare().oldest(); page; page = page->newer) {
    if (page->references != 0 || !page->resident || uses.contains(page))
      throw Error("I5: spare page ", page->handle, " is in use");
  }
  const std::string made = text("I5: ", used_, " used and ", spare(), " spare pages");
  if (used_ + spare() > budget()) throw Error(made, " pass the budget of ", budget());
  if (ledger_ != nullptr && used_ + private_copies_ + spare() > charged())
    throw Error(made, " pass the ", charged(), " charged to the shared budget");
}

}  // namespace vtensor
