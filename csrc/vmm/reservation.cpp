#include "vmm/reservation.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace vtensor {

Reservation::Reservation(Driver& driver, PageStore& pages, const RowShape& shape,
                         std::size_t row_pages)
    : PageTable(shape.rows),
      driver_(driver),
      pages_(pages),
      row_pages_(row_pages),
      row_stride_(shape.row_stride != 0 ? shape.row_stride : row_pages),
      page_size_(driver.traits().page_size),
      zeroed_(shape.zeroed) {}

void Reservation::take(std::size_t row, const Page* previous, std::size_t n,
                       std::vector<Page*>& out) {
  if (homes_.empty()) homes_.resize(rows(), {row_pages_});
  pages_.take(homes_[row], previous, n, stitched_, out);
}

Reservation::Arrival Reservation::shared(Interval indices, std::span<Page* const> pages) const {
  Arrival arrival;
  arrival.given = pages;
  arrival.state = EntryState::copy_on_write;
  for (std::size_t row = 0; row < rows(); ++row) arrival.runs.push_back({row, indices});
  return arrival;
}

void Reservation::map(PoolLock& lock, std::span<Arrival* const> all, Stream stream, bool populate) {
  if (all.empty()) return;
  std::size_t claimed = 0;
  try {
    for (; claimed < all.size(); ++claimed) all[claimed]->range->claim(*all[claimed]);
  } catch (...) {
    for (Arrival* const arrival : all.first(claimed)) {
      arrival->error = std::current_exception();
      arrival->range->enter(*arrival);
    }
    throw;
  }
  {
    const Unlocked unlocked(lock);
    carry_out(all, stream, populate);
  }
  for (Arrival* const arrival : all) arrival->range->enter(*arrival);
  if (const std::exception_ptr& error = all.front()->error) std::rethrow_exception(error);
}

void Reservation::map(PoolLock& lock, Arrival& arrival, Stream stream, bool populate) {
  arrival.range = this;
  Arrival* const one = &arrival;
  if (!arrival.runs.empty()) map(lock, {&one, 1}, stream, populate);
}

void Reservation::claim(Arrival& arrival) {
  pages_.raise_if_broken();
  arrival.range = this;
  const bool given = !arrival.given.empty();
  const std::size_t n = pages_of(arrival.runs);
  if (shared_) shared_->expect(n);
  std::size_t claimed = 0, done = 0;
  try {
    arrival.handles.resize(n);
    if (!given) arrival.taken.reserve(n);  // once for all runs
    for (const Run& run : arrival.runs) {
      const auto [begin, end] = run.indices;
      const Page* const previous = begin == 0 ? nullptr : at(run.row, begin - 1).page();
      if (!given) take(run.row, previous, run.indices.size(), arrival.taken);
      const std::span<Page* const> all = given ? arrival.given : arrival.taken;
      const std::span<Page* const> pages = all.subspan(done, end - begin);
      Handle* handle = &arrival.handles[done];
      arrive(run.row, begin, pages, [&](Page* page) VT_LOCKED {
        if (given) pages_.share(page);
        *handle++ = page->handle;
      });
      done += pages.size();
      ++claimed;
    }
  } catch (...) {
    arrival.error = std::current_exception();
    arrival.runs.resize(claimed);
    if (shared_) shared_->forgo(n - done);
    enter(arrival);
    throw;
  }
}

void Reservation::carry_out(std::span<Arrival* const> all, Stream stream, bool populate) noexcept {
  const Arrival& any = *all.front();
  const Reservation& first = *any.range;
  std::size_t mapped = 0;
  std::exception_ptr error;
  try {
    std::vector<PageRun> runs;
    std::size_t pages = 0;
    for (const Arrival* const arrival : all) {
      pages += arrival->handles.size();
      std::span<const Handle> handles = arrival->handles;
      for (const Run& run : arrival->runs) {
        runs.push_back({arrival->range->address(run), handles.first(run.indices.size())});
        handles = handles.subspan(run.indices.size());
      }
    }
    {
      const trace::Span span(trace::What::map, runs.front().at, pages * first.page_size_,
                             first.base_);
      first.driver_.map(runs, access_of(any.state), mapped);
    }
    if (!any.given.empty()) return;
    for (Arrival* const arrival : all) arrival->range->ready(*arrival, stream, populate);
    return;
  } catch (...) {
    error = std::current_exception();
  }
  for (Arrival* const arrival : all) {
    arrival->error = error;
    arrival->mapped = std::min(mapped, arrival->handles.size());
    mapped -= arrival->mapped;
  }
}

void Reservation::ready(Arrival& arrival, Stream stream, bool populate) const {
  const std::uint64_t owner = zeroed_ ? kNoOwner : owner_;
  Page* const* page = arrival.taken.data();
  bool zeroing = false;
  for (const Run& run : arrival.runs) {
    const std::size_t n = run.indices.size();
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t begin = i;
      while (i < n && pages_.must_zero(*page[i], owner)) ++i;
      if (i == begin) continue;
      zero({address(run) + begin * page_size_, (i - begin) * page_size_}, stream);
      zeroing = true;
    }
    if (populate) {
      const trace::Span span(trace::What::populate, address(run), n * page_size_, base_);
      driver_.populate(address(run), n);
    }
    page += n;
  }
  if (zeroing && arrival.ahead) arrival.zeroed = driver_.fence(stream);
}

void Reservation::enter(const Arrival& arrival) {
  if (arrival.error == nullptr) {
    const bool writable = arrival.state == EntryState::writable;
    for (const Run& run : arrival.runs) {
      arrived(run, arrival.state, [this, writable](Page* page) VT_LOCKED {
        if (writable) page->last_owner = owner_;
      });
      show(run);
    }
    return;
  }
  std::size_t i = 0;
  for (const Run& run : arrival.runs) {
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index, ++i) {
      Page* const page = at(run.row, index).page();
      if (i < arrival.mapped) {
        set(run.row, index, {page, EntryState::leaving});
        continue;
      }
      const bool dirty = page->dirty;
      pages_.drop(page);
      if (shared_) shared_->forgo(1);
      // Taken pages were not written to. Given pages may have been, by others that have dropped
      // them since.
      if (arrival.given.empty()) page->dirty = dirty;
      set(run.row, index, {});
    }
  }
}

bool Reservation::await_work(Stream stream) const noexcept {
  try {
    return wait_for(driver_, driver_.fence(stream), pages_.patience());
  } catch (...) {
    return false;
  }
}

Reservation::Departure Reservation::departing(std::span<const Interval> within) const {
  Departure departure;
  std::vector<Run> asleep;
  // Runs of one state each; negative for sleeping pages.
  const auto kind = [](Entry entry) {
    const int state = 1 + static_cast<int>(entry.state());
    if (is_leaving(entry)) return state;
    if (!is_mapped(entry)) return 0;
    return is_awake(entry) ? state : -state;
  };
  for (const Interval indices : within) {
    for (std::size_t row = 0; row < rows(); ++row) {
      each_run(row, indices, kind, [&](const Run& run, int kind) {
        (kind > 0 ? departure.runs : asleep).push_back(run);
      });
    }
  }
  departure.awake = departure.runs.size();
  departure.runs.insert(departure.runs.end(), asleep.begin(), asleep.end());
  return departure;
}

void Reservation::carry_out(Departure& departure,
                            std::chrono::steady_clock::time_point until) const noexcept {
  try {
    while (departure.done < departure.awake) {
      if (departure.done != 0 && std::chrono::steady_clock::now() >= until) return;
      std::size_t end = departure.done;
      const Address at = address(departure.runs[end]);
      std::size_t pages = 0;
      do {  // adjacent runs, also of adjacent rows, in one call
        pages += departure.runs[end++].indices.size();
      } while (end < departure.awake && address(departure.runs[end]) == at + pages * page_size_);
      const trace::Span span(trace::What::unmap, at, pages * page_size_, base_);
      driver_.unmap(at, pages);
      departure.done = end;
    }
    departure.done = departure.runs.size();
  } catch (...) {
    departure.error = std::current_exception();
  }
}

void Reservation::enter(const Departure& departure) {
  for (const Run& run : std::span(departure.runs).first(departure.done)) {
    std::size_t index = run.indices.begin;
    departed(run, [&](Page* page) VT_LOCKED { let_go(run.row, index++, page); });
  }
}

void Reservation::show_in(std::shared_ptr<SharedRange> shared) {
  if (!shared) return;
  const Interval all{0, reserved()};
  const std::vector<Run> mapped = collect(all, is_mapped);
  shared->expect(pages_of(collect(all, [](Entry entry) { return entry.page() != nullptr; })));
  shared_ = std::move(shared);
  for (const Run& run : mapped) show(run);
}

void Reservation::show(const Run& run) {
  if (!shared_) return;
  std::size_t n = shown_at(run.row, run.indices.begin);
  each_page(run, [&](const Page* page) VT_LOCKED { shared_->came(n++, page); });
}

void Reservation::keep_to_the_end(Page* page) noexcept { page->older = std::exchange(kept_, page); }

void Reservation::replace(std::size_t row, std::size_t index, Page* page,
                          EntryState state) noexcept {
  Page* const was = at(row, index).page();
  set(row, index, {page, state});
  if (was != page) {
    let_go(row, index, was);
    if (shared_) shared_->came(shown_at(row, index), page);
  }
  if (state == EntryState::writable) page->last_owner = owner_;
}

void Reservation::end() noexcept {
  while (kept_ != nullptr) {
    Page* const page = std::exchange(kept_, kept_->older);
    pages_.drop(page);
  }
  for (RowHome& home : homes_) pages_.close(home);
  homes_.clear();
}

void Reservation::check(std::unordered_map<const Page*, PageUse>& uses, bool reachable) const {
  PageTable::check_entries(uses, reachable);
  for (const Page* page = kept_; page != nullptr; page = page->older) ++uses[page].entries;
}

void Reservation::event(trace::What what, Interval indices) const {
  trace::event(what, address(0, indices.begin), indices.size() * rows() * page_size_, base_);
}

void Reservation::zero(Bytes bytes, Stream stream) const {
  const trace::Span span(trace::What::zero, bytes.at, bytes.size, base_);
  driver_.zero(bytes.at, bytes.size, stream);
}

std::vector<PageTable::Run> Reservation::unclean_in(Interval indices, std::size_t most) const {
  return collect(indices, [this, &most](Entry entry) VT_LOCKED {
    if (most == 0 || !is_writable(entry) || clean(*entry.page())) return false;
    --most;
    return true;
  });
}

void Reservation::zero(std::span<const Run> runs, Stream stream) const {
  for (const Run& run : runs) zero({address(run), run.indices.size() * page_size_}, stream);
}

void Reservation::make_clean(PoolLock& lock, std::span<const Run> runs, Stream stream) {
  if (runs.empty()) return;
  {
    const Unlocked unlocked(lock);
    zero(runs, stream);
  }
  for (const Run& run : runs)
    each_page(run, [this](Page* page) VT_LOCKED { page->last_owner = owner_; });
}

}  // namespace vtensor
