#include "vmm/reservation.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"
#include "vmm/wait.h"

namespace vtensor {

Reservation::Reservation(Driver& driver, PageStore& pages, const RowShape& shape,
                         std::size_t row_pages, std::chrono::nanoseconds patience)
    : driver_(driver),
      pages_(pages),
      patience_(patience),
      rows_(shape.rows),
      row_pages_(row_pages),
      row_stride_(shape.row_stride != 0 ? shape.row_stride : row_pages),
      page_size_(driver.traits().page_size),
      zeroed_(shape.zeroed),
      table_(shape.rows) {}

template <typename Counted>
std::size_t Reservation::count(Interval indices, Counted counted) const {
  std::size_t pages = 0;
  const std::size_t end = std::min(indices.end, reserved());
  for (std::size_t row = 0; row < rows_; ++row) {
    for (std::size_t index = indices.begin; index < end; ++index) pages += counted(at(row, index));
  }
  return pages;
}

std::size_t Reservation::count_mapped(Interval indices) const { return count(indices, is_mapped); }

std::size_t Reservation::count_taken(Interval indices) const {
  return count(indices, [](const Entry& entry) {
    return is_mapped(entry) || entry.state == EntryState::arriving;
  });
}

std::size_t Reservation::count_quarantined(Interval indices) const {
  if (quarantined() == 0) return 0;
  return count(indices, [](const Entry& entry) { return entry.state == EntryState::quarantined; });
}

void Reservation::collect(std::vector<Run>& runs, std::size_t row, Interval indices,
                          bool (*wanted)(const Entry&)) const {
  const std::size_t end = std::min(indices.end, reserved());
  if (indices.begin >= end) return;
  const Entry* const entries = &at(row, 0);
  for (std::size_t index = indices.begin; index < end;) {
    const EntryState state = entries[index].state;
    const std::size_t first = index;
    while (index < end && entries[index].state == state) ++index;
    if (wanted(entries[first])) runs.push_back({row, {first, index}});
  }
}

std::vector<Reservation::Run> Reservation::collect(Interval indices,
                                                   bool (*wanted)(const Entry&)) const {
  std::vector<Run> runs;
  for (std::size_t row = 0; row < rows_; ++row) collect(runs, row, indices, wanted);
  return runs;
}

void Reservation::add_page_runs(std::vector<PageRun>& to, std::span<const Run> runs,
                                std::span<const Handle> handles) const {
  for (const Run& run : runs) {
    to.push_back({address(run), handles.first(run.indices.size())});
    handles = handles.subspan(run.indices.size());
  }
}

void Reservation::open_homes() {
  homes_.reserve(rows_);
  while (homes_.size() < rows_) {
    homes_.push_back(pages_.open_home(row_pages_));
    homes_.back().stitched = stitched_;
  }
}

void Reservation::claim(Arrival& arrival) {
  std::size_t claimed = 0;
  if (arrival.shared) return claim_shared(arrival);
  try {
    open_homes();
    for (const Run& run : arrival.runs) {
      const Page* previous = run.indices.begin ? at(run.row, run.indices.begin - 1).page : nullptr;
      const std::size_t begin = arrival.pages.size();
      pages_.take(homes_[run.row], previous, run.indices.size(), arrival.pages);
      Entry* entry = table_.entries(run.row, run.indices.begin);
      for (std::size_t i = begin; i < arrival.pages.size(); ++i)
        *entry++ = {arrival.pages[i], EntryState::arriving};
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

void Reservation::claim_shared(Arrival& arrival) {
  arrival.stuck.reserve(arrival.pages.size());
  Page* const* page = arrival.pages.data();
  for (const Run& run : arrival.runs) {
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index, ++page) {
      pages_.share(*page);
      table_.at(run.row, index) = {*page, EntryState::arriving};
    }
  }
}

void Reservation::carry_out(std::span<const Arriving> all, Stream stream, bool populate) noexcept {
  const Reservation& first = *all.front().range;
  const PageStore& pages_of = first.pages_;
  Driver& driver = first.driver_;
  const std::size_t page_size = first.page_size_;
  std::vector<PageRun> runs;
  std::vector<Handle> handles;
  bool mapped = false, zeroing = false;

  // `stuck` counts the pages of all arrivals in their order; all of them are if it is null.
  const auto fail = [&all](const std::exception_ptr& error, const std::vector<std::size_t>* stuck) {
    std::size_t at = 0;
    for (const Arriving& one : all) {
      one.arrival->error = error;
      for (std::size_t i = 0; i < one.arrival->pages.size(); ++i, ++at) {
        if (stuck == nullptr || is_stuck(*stuck, at)) one.arrival->stuck.push_back(i);
      }
    }
  };
  const std::vector<std::size_t> none;
  try {
    std::size_t pages = 0, run_count = 0;
    for (const Arriving& one : all) {
      pages += one.arrival->pages.size();
      run_count += one.arrival->runs.size();
    }
    handles.reserve(pages);
    runs.reserve(run_count);
    for (const Arriving& one : all) {
      for (const Page* page : one.arrival->pages) handles.push_back(page->handle);
    }
    std::span<const Handle> rest = handles;
    for (const Arriving& one : all) {
      one.range->add_page_runs(runs, one.arrival->runs, rest);
      rest = rest.subspan(one.arrival->pages.size());
    }
    {
      const trace::Span span(trace::What::map, runs.front().at, pages * page_size, first.base_);
      driver.map(runs, all.front().arrival->shared ? Access::copy_on_write : Access::writable);
    }
    if (all.front().arrival->shared) return;
    mapped = true;
    const PageRun* run = runs.data();
    for (const Arriving& one : all) {
      const std::uint64_t owner = one.range->zeroed_ ? kNoOwner : one.range->owner_;
      Page* const* page = one.arrival->pages.data();
      for (std::size_t r = 0; r < one.arrival->runs.size(); ++r, ++run) {
        const std::size_t n = run->handles.size();
        for (std::size_t i = 0; i < n; ++i) {
          if (!pages_of.must_zero(*page[i], owner)) continue;
          const std::size_t begin = i;
          while (i < n && pages_of.must_zero(*page[i], owner)) ++i;
          one.range->zero({run->at + begin * page_size, (i - begin) * page_size}, stream);
          zeroing = one.arrival->zeroing = true;
        }
        if (populate) {
          const trace::Span span(trace::What::populate, run->at, n * page_size, one.range->base_);
          driver.populate(run->at, n);
        }
        page += n;
      }
      if (one.arrival->zeroing && one.arrival->ahead) one.arrival->zeroed = driver.fence(stream);
    }
  } catch (const UndoFailed& error) {
    fail(std::current_exception(), &error.stuck);
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (!mapped) return fail(error, &none);
    // Nobody saw these pages yet. What cannot be unmapped may show another's bytes: quarantined.
    if (zeroing && !first.await_work(stream)) return fail(error, nullptr);
    try {
      const trace::Span span(trace::What::unmap, runs.front().at, handles.size() * page_size,
                             first.base_);
      driver.unmap(runs, Access::writable);
      fail(error, &none);
    } catch (const UndoFailed& unmapping) {
      fail(error, &unmapping.stuck);
    } catch (...) {
      fail(error, nullptr);
    }
  }
}

void Reservation::enter(Arrival& arrival) {
  Page* const* page = arrival.pages.data();
  if (!arrival.error) {
    for (const Run& run : arrival.runs) {
      Entry* const entries = table_.entries(run.row, run.indices.begin);
      for (std::size_t i = 0; i < run.indices.size(); ++i, ++page) {
        if (!arrival.shared) (*page)->last_owner = owner_;
        entries[i].state = arrival.shared ? EntryState::copy_on_write : EntryState::writable;
      }
      mapped_ += run.indices.size();
      if (arrival.shared) copy_on_write_ += run.indices.size();
    }
    return;
  }
  std::size_t at = 0;
  for (const Run& run : arrival.runs) {
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index, ++at) {
      if (is_stuck(arrival.stuck, at)) {
        quarantine(run.row, index);
        continue;
      }
      const bool dirty = page[at]->dirty;  // it was not written to here
      pages_.drop(page[at]);
      page[at]->dirty = dirty;
      table_.at(run.row, index) = {};
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
  if (arrival.runs.empty()) return;
  try {
    Departure departure = departing(arrival.runs, arrival.runs.size());
    bool over = true;
    if (arrival.zeroing) {
      const Waiting waiting(lock);
      over = await_work(stream);
    }
    if (over) {
      carry_out(departure);
      enter(departure, false);
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

void Reservation::part_asleep(std::vector<Run>& runs, std::vector<Run>& asleep) const {
  if (pages_.asleep() == 0) return;
  std::vector<Run> awake;
  for (const Run& run : runs) {
    for (std::size_t index = run.indices.begin; index < run.indices.end;) {
      const std::size_t first = index;
      const bool sleeps = at(run.row, first).page->asleep;
      while (index < run.indices.end && at(run.row, index).page->asleep == sleeps) ++index;
      (sleeps ? asleep : awake).push_back({run.row, {first, index}});
    }
  }
  runs = std::move(awake);
}

Reservation::Departure Reservation::departing(std::vector<Run> runs, std::size_t writable) {
  Departure departure;
  departure.writable = writable;
  departure.awake = runs.size();
  if (pages_.asleep() != 0) {
    const auto border = runs.begin() + static_cast<std::ptrdiff_t>(writable);
    std::vector<Run> shared(border, runs.end()), asleep;
    runs.erase(border, runs.end());
    part_asleep(runs, asleep);
    part_asleep(shared, asleep);
    departure.writable = runs.size();
    runs.insert(runs.end(), shared.begin(), shared.end());
    departure.awake = runs.size();
    runs.insert(runs.end(), asleep.begin(), asleep.end());
  }
  departure.runs = std::move(runs);
  for (const Run& run : departure.runs) {
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index)
      departure.handles.push_back(at(run.row, index).page->handle);
  }
  departure.stuck.reserve(departure.handles.size());
  return departure;
}

void Reservation::carry_out(Departure& departure,
                            std::optional<std::chrono::steady_clock::time_point> until) noexcept {
  const std::size_t at_once = until ? 1 : departure.awake;
  try {
    std::vector<PageRun> batch;
    batch.reserve(at_once);
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

void Reservation::enter(Departure& departure, bool aged) {
  for (std::size_t i = 0; i < departure.done; ++i) {
    const Run& run = departure.runs[i];
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index) {
      Entry& entry = table_.at(run.row, index);
      if (is_copy_on_write(entry)) --copy_on_write_;
      pages_.drop(entry.page, aged);
      entry = {};
    }
    mapped_ -= run.indices.size();
  }
  std::size_t at = 0;
  for (std::size_t i = departure.done; i < departure.runs.size(); ++i) {
    const Run& run = departure.runs[i];
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index, ++at) {
      if (is_stuck(departure.stuck, at)) quarantine(run.row, index);
    }
  }
}

void Reservation::end(Reservation* host) noexcept {
  if (quarantined() != 0) {
    if (host != nullptr) host->quarantined_ += quarantined();
    for (std::size_t row = 0; row < rows_; ++row) {
      for (std::size_t index = 0; index < reserved(); ++index) {
        if (Page* page = at(row, index).page) pages_.drop(page);
      }
    }
  }
  for (RowHome& home : homes_) pages_.close_home(home);
  homes_.clear();
}

void Reservation::event(trace::What what, Interval indices) const {
  trace::event(what, address(0, indices.begin), indices.size() * rows_ * page_size_, base_);
}

void Reservation::zero(Bytes bytes, Stream stream) {
  const trace::Span span(trace::What::zero, bytes.at, bytes.size, base_);
  driver_.zero(bytes.at, bytes.size, stream);
}

std::vector<Reservation::Run> Reservation::unclean_in(Interval indices) const {
  std::vector<Run> runs;
  const auto is_unclean = [this](const Entry& entry)
                              VT_LOCKED { return is_writable(entry) && !clean(*entry.page); };
  const std::size_t end = std::min(indices.end, reserved());
  for (std::size_t row = 0; row < rows_; ++row) {
    for (std::size_t index = indices.begin; index < end; ++index) {
      const std::size_t first = index;
      while (index < end && is_unclean(at(row, index))) ++index;
      if (index > first) runs.push_back({row, {first, index}});
    }
  }
  return runs;
}

void Reservation::make_clean(std::span<const Run> runs, Stream stream) {
  for (const Run& run : runs) zero({address(run), run.indices.size() * page_size_}, stream);
  for (const Run& run : runs) {
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index)
      at(run.row, index).page->last_owner = owner_;
  }
}

void Reservation::quarantine(std::size_t row, std::size_t index) noexcept {
  Entry& entry = table_.at(row, index);
  copy_on_write_ -= is_copy_on_write(entry);
  mapped_ -= entry.mapped();
  ++quarantined_;
  entry.state = EntryState::quarantined;
  pages_.quarantine(entry.page);
}

std::size_t Reservation::add_pages(std::unordered_set<const Page*>& seen) const {
  std::size_t shared = 0;
  for (std::size_t row = 0; row < rows_; ++row) {
    for (std::size_t index = 0; index < reserved(); ++index) {
      const Entry& entry = at(row, index);
      if (is_mapped(entry) && seen.insert(entry.page).second) shared += entry.page->references > 1;
    }
  }
  return shared;
}

void Reservation::check(std::unordered_map<const Page*, PageUse>& uses, bool reachable) const {
  std::size_t mapped = 0, copy_on_write = 0;
  for (std::size_t row = 0; row < rows_; ++row) {
    for (std::size_t index = 0; index < reserved(); ++index) {
      const Entry& entry = at(row, index);
      if ((entry.page == nullptr) != (entry.state == EntryState::empty)) {
        throw Error("I3: index " + std::to_string(index) + " of row " + std::to_string(row) +
                    " has a page and no mapping, or a mapping and no page");
      }
      if (entry.page == nullptr) continue;
      PageUse& use = uses[entry.page];
      ++use.entries;
      if (reachable) {
        ++use.reachable;
        use.writable |= is_writable(entry);
      }
      mapped += entry.mapped();
      copy_on_write += is_copy_on_write(entry);
    }
  }
  if (mapped != mapped_ || copy_on_write != copy_on_write_)
    throw Error("I4: the counts of mapped pages are wrong");
}

}  // namespace vtensor
