#include "vmm/reservation.h"

#include <utility>

#include "base/errors.h"
#include "vmm/wait.h"

namespace vtensor {

Reservation::Reservation(Driver& driver, PageStore& pages, const RowShape& shape,
                         std::size_t row_pages, std::chrono::nanoseconds patience)
    : PageTable(shape.rows),
      driver_(driver),
      pages_(pages),
      patience_(patience),
      row_pages_(row_pages),
      row_stride_(shape.row_stride != 0 ? shape.row_stride : row_pages),
      page_size_(driver.traits().page_size),
      zeroed_(shape.zeroed) {}

void Reservation::add_page_runs(std::vector<PageRun>& to, std::span<const Run> runs,
                                std::span<const Handle> handles) const {
  for (const Run& run : runs) {
    to.push_back({address(run), handles.first(run.indices.size())});
    handles = handles.subspan(run.indices.size());
  }
}

void Reservation::take(std::size_t row, const Page* previous, std::size_t n,
                       std::vector<Page*>& out) {
  homes_.reserve(rows());
  while (homes_.size() < rows()) {
    homes_.push_back(pages_.open_home(row_pages_));
    homes_.back().stitched = stitched_;
  }
  pages_.take(homes_[row], previous, n, out);
}

Reservation::Arrival Reservation::shared(Interval indices, std::vector<Page*> pages) const {
  Arrival arrival;
  arrival.given = true;
  arrival.state = EntryState::copy_on_write;
  arrival.pages = std::move(pages);
  for (std::size_t row = 0; row < rows(); ++row) arrival.runs.push_back({row, indices});
  return arrival;
}

void Reservation::map(PoolLock& lock, std::span<const Arriving> all, Stream stream, bool populate) {
  if (all.empty()) return;
  std::size_t claimed = 0;
  try {
    for (; claimed < all.size(); ++claimed) all[claimed].range->claim(*all[claimed].arrival);
  } catch (...) {
    for (const auto& [range, arrival] : all.first(claimed)) {
      arrival->error = std::current_exception();
      range->enter(*arrival);
    }
    throw;
  }
  {
    const Unlocked unlocked(lock);
    carry_out(all, stream, populate);
  }
  for (const auto& [range, arrival] : all) range->enter(*arrival);
  if (const std::exception_ptr& error = all.front().arrival->error) std::rethrow_exception(error);
}

void Reservation::map(PoolLock& lock, Arrival& arrival, Stream stream, bool populate) {
  const Arriving one{this, &arrival};
  if (!arrival.runs.empty()) map(lock, {&one, 1}, stream, populate);
}

void Reservation::claim(Arrival& arrival) {
  std::size_t claimed = 0, page = 0;
  try {
    for (const Run& run : arrival.runs) {
      const auto [begin, end] = run.indices;
      const Page* const previous = begin == 0 ? nullptr : at(run.row, begin - 1).page();
      if (!arrival.given) take(run.row, previous, run.indices.size(), arrival.pages);
      const std::span<Page* const> pages = std::span(arrival.pages).subspan(page, end - begin);
      if (arrival.given) {
        for (Page* const one : pages) pages_.share(one);
      }
      arrive(run.row, begin, pages);
      page += pages.size();
      ++claimed;
    }
    arrival.stuck.reserve(arrival.pages.size());
  } catch (...) {
    arrival.error = std::current_exception();
    arrival.runs.resize(claimed);
    enter(arrival);
    throw;
  }
}

void Reservation::carry_out(std::span<const Arriving> all, Stream stream, bool populate) noexcept {
  const Reservation& first = *all.front().range;
  const Arrival& any = *all.front().arrival;
  std::vector<PageRun> runs;
  std::vector<Handle> handles;
  bool mapped = false;

  // `stuck` counts the pages of all arrivals in their order; all of them are if it is null.
  const auto fail = [&all](const std::exception_ptr& error, const std::vector<std::size_t>* stuck) {
    std::size_t page = 0;
    for (const Arriving& one : all) {
      one.arrival->error = error;
      for (std::size_t i = 0; i < one.arrival->pages.size(); ++i, ++page) {
        if (stuck == nullptr || is_stuck(*stuck, page)) one.arrival->stuck.push_back(i);
      }
    }
  };
  const std::vector<std::size_t> none;
  try {
    std::size_t pages = 0;
    for (const Arriving& one : all) pages += one.arrival->pages.size();
    handles.reserve(pages);  // which the runs refer to
    for (const auto& [range, arrival] : all) {
      const std::size_t begin = handles.size();
      for (const Page* page : arrival->pages) handles.push_back(page->handle);
      range->add_page_runs(runs, arrival->runs, std::span(handles).subspan(begin));
    }
    {
      const trace::Span span(trace::What::map, runs.front().at, pages * first.page_size_,
                             first.base_);
      first.driver_.map(runs, access_of(any.state));
    }
    mapped = true;
    if (any.given) return;
    for (const auto& [range, arrival] : all) range->ready(*arrival, stream, populate);
  } catch (const UndoFailed& error) {
    fail(std::current_exception(), &error.stuck);
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (!mapped) return fail(error, &none);
    // No owner has seen these pages. What cannot be unmapped may show another's bytes: quarantined.
    const bool zeroing = std::any_of(all.begin(), all.end(),
                                     [](const Arriving& one) { return one.arrival->zeroing; });
    if (zeroing && !first.await_work(stream)) return fail(error, nullptr);
    try {
      const trace::Span span(trace::What::unmap, runs.front().at, handles.size() * first.page_size_,
                             first.base_);
      first.driver_.unmap(runs, Access::writable);
      fail(error, &none);
    } catch (const UndoFailed& unmapping) {
      fail(error, &unmapping.stuck);
    } catch (...) {
      fail(error, nullptr);
    }
  }
}

void Reservation::ready(Arrival& arrival, Stream stream, bool populate) const {
  const std::uint64_t owner = zeroed_ ? kNoOwner : owner_;
  Page* const* page = arrival.pages.data();
  for (const Run& run : arrival.runs) {
    const std::size_t n = run.indices.size();
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t begin = i;
      while (i < n && pages_.must_zero(*page[i], owner)) ++i;
      if (i == begin) continue;
      zero({address(run) + begin * page_size_, (i - begin) * page_size_}, stream);
      arrival.zeroing = true;
    }
    if (populate) {
      const trace::Span span(trace::What::populate, address(run), n * page_size_, base_);
      driver_.populate(address(run), n);
    }
    page += n;
  }
  if (arrival.zeroing && arrival.ahead) arrival.zeroed = driver_.fence(stream);
}

void Reservation::enter(const Arrival& arrival) {
  if (arrival.error == nullptr) {
    for (const Run& run : arrival.runs) arrived(run, arrival.state);
    if (arrival.state == EntryState::writable) {
      for (Page* const page : arrival.pages) page->last_owner = owner_;
    }
    return;
  }
  std::size_t i = 0;
  for (const Run& run : arrival.runs) {
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index, ++i) {
      Page* const page = arrival.pages[i];
      if (is_stuck(arrival.stuck, i)) {
        quarantine(run.row, index);
      } else {
        const bool dirty = page->dirty;  // it was not written to here
        pages_.drop(page);
        page->dirty = dirty;
        set(run.row, index, {});
      }
    }
  }
}

bool Reservation::await_work(Stream stream) const noexcept {
  try {
    return wait_for(driver_, driver_.fence(stream), patience_);
  } catch (...) {
    return false;
  }
}

void Reservation::undo(PoolLock& lock, Stream stream, const Arrival& arrival) noexcept {
  if (arrival.runs.empty() || arrival.error) return;
  try {
    Departure departure = departing(arrival.runs);
    bool over = true;
    if (arrival.zeroing) {
      const Waiting waiting(lock);
      over = await_work(stream);
    }
    if (over) {
      carry_out(departure);
      enter(departure);
    }
  } catch (...) {
    // No memory: they are given up.
  }
  for (const Run& run : arrival.runs) {
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index) {
      if (is_mapped(at(run.row, index))) quarantine(run.row, index);
    }
  }
}

Reservation::Departure Reservation::departing(std::span<const Run> within) const {
  Departure departure;
  std::vector<Run> copy_on_write, asleep;
  std::vector<Run>* const of_kind[] = {&departure.runs, &copy_on_write, &asleep};
  const auto kind = [](Entry entry) {
    if (!is_mapped(entry)) return 0;
    return !is_awake(entry) ? 3 : is_copy_on_write(entry) ? 2 : 1;
  };
  for (const Run& run : within) {
    each_run(run.row, run.indices, kind,
             [&of_kind](const Run& some, int kind) { of_kind[kind - 1]->push_back(some); });
  }
  departure.writable = departure.runs.size();
  departure.awake = departure.writable + copy_on_write.size();
  departure.runs.insert(departure.runs.end(), copy_on_write.begin(), copy_on_write.end());
  departure.runs.insert(departure.runs.end(), asleep.begin(), asleep.end());
  for (const Run& run : departure.runs)
    each_page(run, [&](const Page* page) { departure.handles.push_back(page->handle); });
  departure.stuck.reserve(departure.handles.size());
  return departure;
}

void Reservation::carry_out(
    Departure& departure,
    std::optional<std::chrono::steady_clock::time_point> until) const noexcept {
  const std::size_t at_once = until ? 1 : departure.awake;
  try {
    std::vector<PageRun> batch;
    std::span<const Handle> handles = departure.handles;
    while (departure.done < departure.awake) {
      if (until && departure.done != 0 && std::chrono::steady_clock::now() >= *until) return;
      const bool writable = departure.done < departure.writable;
      const std::size_t end = writable ? departure.writable : departure.awake;
      batch.clear();
      add_page_runs(batch,
                    std::span(departure.runs)
                        .subspan(departure.done, std::min(end - departure.done, at_once)),
                    handles);
      std::size_t pages = 0;
      for (const PageRun& run : batch) pages += run.handles.size();
      const trace::Span span(trace::What::unmap, batch.front().at, pages * page_size_, base_);
      driver_.unmap(batch, writable ? Access::writable : Access::copy_on_write);
      departure.done += batch.size();
      handles = handles.subspan(pages);
    }
    departure.done = departure.runs.size();
  } catch (const UndoFailed& error) {
    departure.error = std::current_exception();
    departure.stuck.assign(error.stuck.begin(), error.stuck.end());
  } catch (...) {
    departure.error = std::current_exception();
  }
}

void Reservation::enter(const Departure& departure) {
  std::size_t refused = 0;
  for (std::size_t i = 0; i < departure.runs.size(); ++i) {
    const Run& run = departure.runs[i];
    if (i < departure.done) {
      departed(run, [this](Page* page) VT_LOCKED { pages_.drop(page); });
      continue;
    }
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index) {
      if (is_stuck(departure.stuck, refused++)) quarantine(run.row, index);
    }
  }
}

void Reservation::replace(std::size_t row, std::size_t index, Page* page,
                          EntryState state) noexcept {
  if (Page* const was = at(row, index).page(); was != page) pages_.drop(was);
  set(row, index, {page, state});
  if (state == EntryState::writable) page->last_owner = owner_;
}

void Reservation::quarantine(std::size_t row, std::size_t index) noexcept {
  Page* const page = at(row, index).page();
  set(row, index, {page, EntryState::quarantined});
  pages_.quarantine(page);
}

void Reservation::end(Reservation* host) noexcept {
  if (quarantined() != 0) {
    if (host != nullptr) host->add_quarantined(quarantined());
    for_each([this](Entry entry, std::size_t, std::size_t) VT_LOCKED {
      if (entry.page() != nullptr) pages_.drop(entry.page());
    });
  }
  for (RowHome& home : homes_) pages_.close_home(home);
  homes_.clear();
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

void Reservation::make_clean(std::span<const Run> runs, Stream stream) {
  zero(runs, stream);
  for (const Run& run : runs)
    each_page(run, [this](Page* page) VT_LOCKED { page->last_owner = owner_; });
}

}  // namespace vtensor
