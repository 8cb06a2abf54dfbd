// The memory of free pages: made where it is missing, kept for the next user, given back.
#include <algorithm>
#include <exception>
#include <utility>

#include "base/errors.h"
#include "core/buffer.h"
#include "core/page_pool.h"

namespace vtensor {

using std::chrono::steady_clock;

bool PagePool::make_ready(PoolLock& lock, std::size_t pages) {
  if (traits().adjacent_handles || kept_.size() >= pages) return false;
  const std::size_t missing = pages - kept_.size();
  std::vector<Handle> made;
  std::exception_ptr error;
  try {
    const Unlocked unlocked(lock);
    made.reserve(missing);
    while (made.size() < missing) made.push_back(driver_->create(1));
  } catch (...) {
    error = std::current_exception();
  }
  for (const Handle handle : made) keep(placement_->adopt(handle));
  just_made_ += made.size();
  const std::size_t full = used_ + parted_ + kept_.size();
  if (full > budget_pages()) release(lock, full - budget_pages());
  if (error) std::rethrow_exception(error);
  return true;
}

void PagePool::take(RowHome& home, const Page* previous, std::size_t n, std::vector<Page*>& out) {
  const std::size_t begin = out.size();
  std::size_t empty_pages = 0;
  try {
    placement_->pick(home, previous, n, out);
    for (std::size_t i = begin; i < out.size(); ++i) empty_pages += !out[i]->resident;
    make_room(out.size() - begin, empty_pages);
  } catch (...) {
    for (std::size_t i = begin; i < out.size(); ++i) {
      out[i]->references = 0;
      if (out[i]->resident) kept_.push(out[i]);
      placement_->put_back(out[i]);
    }
    out.resize(begin);
    throw;
  }
  if (empty_pages != 0) {
    for (std::size_t i = begin; i < out.size(); ++i) out[i]->resident = true;
  }
  const std::size_t made = std::min(n - empty_pages, just_made_);
  just_made_ -= made;
  counted.pages_fresh += empty_pages + made;
  counted.pages_recycled += n - empty_pages - made;
  used_ += n;
  if (kept_.size() < low_) call_mapper();
}

// Gives back kept memory until `taken` more pages fit the budget, of which `fresh` have no memory
// yet.
void PagePool::make_room(std::size_t taken, std::size_t fresh) {
  if (fresh == 0) return;
  while (used_ + parted_ + taken + kept_.size() > budget_pages() && kept_.oldest())
    empty(kept_.oldest(), 1);
}

void PagePool::release(PoolLock& lock, std::size_t n) {
  n = std::min(n, kept_.size());
  if (traits().adjacent_handles) {
    for (; n != 0; --n) empty(kept_.oldest(), 1);
    return;
  }
  std::vector<Page*> leaving;  // in no list meanwhile
  leaving.reserve(n);
  for (; n != 0; --n) {
    leaving.push_back(kept_.oldest());
    kept_.remove(leaving.back());
  }
  std::size_t gone = 0;
  std::exception_ptr error;
  try {
    const Unlocked unlocked(lock);
    for (; gone < leaving.size(); ++gone) driver_->destroy(leaving[gone]->handle, 1);
  } catch (...) {
    error = std::current_exception();
  }
  for (; leaving.size() > gone; leaving.pop_back()) kept_.push_oldest(leaving.back());
  for (Page* page : leaving) placement_->emptied(page);
  if (error) std::rethrow_exception(error);
}

// Gives back the memory of `n` kept pages with handles from first->handle on.
void PagePool::empty(Page* first, std::size_t n) {
  driver_->destroy(first->handle, n);
  for (std::size_t i = 0; i < n; ++i) {
    Page* page = n == 1 ? first : first->run->pages[first->handle - first->run->first + i];
    kept_.remove(page);
    page->resident = false;
    page->dirty = false;
    placement_->emptied(page);
  }
}

// Gives back the memory of all kept pages, neighbours in one call; returns how many.
std::size_t PagePool::empty_all() {
  std::vector<Page*> pages;
  for (Page* page = kept_.oldest(); page; page = page->newer) pages.push_back(page);
  std::sort(pages.begin(), pages.end(),
            [](const Page* a, const Page* b) { return a->handle < b->handle; });
  for (std::size_t begin = 0, end; begin < pages.size(); begin = end) {
    end = begin + 1;
    while (end < pages.size() && pages[begin]->run && pages[end]->run == pages[begin]->run &&
           pages[end]->handle == pages[end - 1]->handle + 1) {
      ++end;
    }
    empty(pages[begin], end - begin);
  }
  return pages.size();
}

void PagePool::drop(Page* page, bool aged) noexcept {
  if (--page->references != 0) return;
  --used_;
  page->dirty = true;
  keep(page, aged);
  placement_->put_back(page);
}

// Keeps the memory of a page that is free from now on, or has been for the longest of all.
void PagePool::keep(Page* page, bool aged) noexcept {
  const bool by_age = options_.max_age.count() != 0;
  page->freed_at = 0;
  if (by_age && !aged) {
    page->freed_at = static_cast<std::uint64_t>(steady_clock::now().time_since_epoch().count());
  }
  aged ? kept_.push_oldest(page) : kept_.push(page);
  if (by_age || kept_.size() > high_) call_mapper();
}

void PagePool::prefill(std::size_t pages) {
  if (pages == 0) return;
  PoolLock lock(shared_from_this());
  reap();
  require_free(lock, "Pool.prefill", pages, 0);
  stock(lock, pages);
}

// Has the memory of `pages` free pages present: takes them, makes what is missing without the lock,
// and puts them back.
void PagePool::stock(PoolLock& lock, std::size_t pages) {
  if (!traits().adjacent_handles) {
    const std::size_t counted_before = just_made_;
    make_ready(lock, pages);
    just_made_ = std::min(just_made_, counted_before);  // nobody asked for them yet
    return;
  }
  RowHome home = open_home(pages);
  std::vector<Page*> taken;
  std::vector<bool> dirty;
  std::vector<std::pair<Handle, std::size_t>> missing;  // runs of handles
  std::exception_ptr error;
  try {
    placement_->pick(home, nullptr, pages, taken);
    for (const Page* page : taken) {
      dirty.push_back(page->dirty);
      if (page->resident) continue;
      if (!missing.empty() && missing.back().first + missing.back().second == page->handle) {
        ++missing.back().second;
      } else {
        missing.emplace_back(page->handle, 1);
      }
    }
    std::size_t fresh = 0;
    for (const auto& [first, n] : missing) fresh += n;
    make_room(taken.size(), fresh);
    used_ += taken.size();
    try {
      const Unlocked unlocked(lock);
      for (const auto& [first, n] : missing) driver_->fill(first, n);
    } catch (...) {
      error = std::current_exception();
    }
  } catch (...) {
    error = std::current_exception();
    dirty.resize(taken.size());
    used_ += taken.size();
  }
  for (std::size_t i = 0; i < taken.size(); ++i) {
    taken[i]->resident = taken[i]->resident || !error;
    if (taken[i]->resident) {
      drop(taken[i]);
    } else {
      taken[i]->references = 0;
      --used_;
      placement_->put_back(taken[i]);
    }
    taken[i]->dirty = dirty[i];
  }
  close_home(home);
  if (error) std::rethrow_exception(error);
}

steady_clock::time_point PagePool::tend_kept(PoolLock& lock) {
  const auto now = steady_clock::now();
  try {
    if (kept_.size() > high_) {
      release(lock, 1);  // one at a time: callers may wait for the lock meanwhile
      return now;
    }
    const std::size_t low = std::min({low_, high_, low_ == 0 ? 0 : spare_pages()});
    if (kept_.size() < low) stock(lock, low);
    auto due = steady_clock::time_point::max();
    if (options_.max_age.count() == 0) return due;
    if (!idle_.empty()) {
      due = idle_.front()->parked_at() + options_.max_age;
      if (due <= now) {
        const std::shared_ptr<Buffer> oldest = idle_.front();
        oldest->unpark_aged();
        return now;
      }
    }
    if (kept_.size() > low) {
      const std::chrono::nanoseconds freed_at(kept_.oldest()->freed_at);
      due = std::min(due, steady_clock::time_point(freed_at) + options_.max_age);
      if (due > now) return due;
      release(lock, 1);
      return now;
    }
    return due;
  } catch (const Error&) {
    return now + std::chrono::seconds(1);  // refused: later, perhaps
  }
  return steady_clock::time_point::max();
}

}  // namespace vtensor
