// The copy-on-write half of a reservation: pages shared between ranges and rows, and copied again.
#include <algorithm>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"
#include "vmm/reservation.h"

namespace vtensor {

void Reservation::map_shared(PoolLock& lock, std::span<const Run> runs,
                             std::span<Page* const> pages, EntryState state) {
  if (runs.empty()) return;
  std::vector<Handle> handles;
  for (const Page* page : pages) handles.push_back(page->handle);
  std::vector<PageRun> mapped;
  std::size_t at = 0;
  for (const Run& run : runs) {
    mapped.push_back({address(run), std::span(handles).subspan(at, run.indices.size())});
    at += run.indices.size();
  }
  const auto for_each = [&](auto enter) VT_LOCKED {
    std::size_t i = 0;
    for (const Run& run : runs) {
      for (std::size_t index = run.indices.begin; index < run.indices.end; ++index, ++i)
        enter(i, table_.at(run.row, index));
    }
  };
  for (Page* page : pages) pages_.share(page);  // they are to be there when the calls are made
  try {
    const Unlocked unlocked(lock);
    const trace::Span span(trace::What::map, mapped.front().at, pages.size() * page_size_, base_);
    driver_.map(mapped,
                state == EntryState::copy_on_write ? Access::copy_on_write : Access::writable);
  } catch (const UndoFailed& error) {
    auto stuck = error.stuck.begin();
    for_each([&](std::size_t i, Entry& entry) VT_LOCKED {
      if (stuck == error.stuck.end() || *stuck != i) return pages_.drop(pages[i]);
      ++stuck;
      entry = {pages[i], EntryState::quarantined};
      pages_.quarantine(pages[i]);
      ++quarantined_;
    });
    throw;
  } catch (...) {
    for (Page* page : pages) pages_.drop(page);
    throw;
  }
  for_each([&](std::size_t i, Entry& entry) VT_LOCKED {
    entry = {pages[i], state};
    if (state == EntryState::writable) pages[i]->last_owner = owner_;  // the owner moves here
  });
  mapped_ += pages.size();
  if (state == EntryState::copy_on_write) copy_on_write_ += pages.size();
}

std::size_t Reservation::fresh_pages_for(std::span<const Run> copy_on_write) const {
  std::size_t fresh = 0;
  for (const Run& run : copy_on_write) {
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index) {
      fresh += at(run.row, index).page->references > 1;
    }
  }
  return fresh;
}

std::vector<std::uint8_t> Reservation::find_private_copies(const Run& run) const {
  std::vector<std::uint8_t> private_copies(run.indices.size());
  if (driver_.traits().kernel_copies_on_write)
    driver_.find_private_copies(address(run), private_copies);
  return private_copies;
}

std::size_t Reservation::count_private_copies(std::span<const Run> copy_on_write) const {
  std::size_t count = 0;
  for (const Run& run : copy_on_write) {
    const std::vector<std::uint8_t> private_copies = find_private_copies(run);
    count += private_copies.size() -
             static_cast<std::size_t>(std::count(private_copies.begin(), private_copies.end(), 0));
  }
  return count;
}

std::size_t Reservation::count_private_copies() const {
  if (copy_on_write_ == 0 || !driver_.traits().kernel_copies_on_write) return 0;
  return count_private_copies(collect({0, row_pages_}, is_copy_on_write));
}

std::vector<Reservation::Run> Reservation::private_copies_in(Interval indices) const {
  std::vector<Run> folded;
  if (copy_on_write_ == 0 || !driver_.traits().kernel_copies_on_write) return folded;
  for (const Run& run : collect(indices, is_copy_on_write)) {
    const std::vector<std::uint8_t> private_copies = find_private_copies(run);
    for (std::size_t i = 0; i < private_copies.size();) {
      const std::size_t first = i;
      while (i < private_copies.size() && private_copies[i]) ++i;
      if (i > first) {
        folded.push_back({run.row, {run.indices.begin + first, run.indices.begin + i}});
      } else {
        ++i;
      }
    }
  }
  return folded;
}

void Reservation::replace(const Run& run, std::span<Page* const> pages) noexcept {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    Entry& entry = table_.at(run.row, run.indices.begin + i);
    if (entry.page != pages[i]) pages_.drop(entry.page);
    pages[i]->last_owner = owner_;
    entry = {pages[i], EntryState::writable};
  }
  copy_on_write_ -= pages.size();
}

void Reservation::unshare(PoolLock& lock, std::span<const Run> runs, std::span<const Bytes> stale,
                          Stream stream) {
  struct Unsharing {
    Run run;
    std::vector<std::uint8_t> private_copies;
    std::vector<Page*> to = {};
    std::vector<Handle> handles = {};  // of `to`
    std::vector<Handle> from = {};
  };
  std::vector<Unsharing> changes;
  std::vector<PageCopy> copies;
  const auto page_at = [this](const Run& run, std::size_t i)
                           VT_LOCKED { return at(run.row, run.indices.begin + i).page; };
  const auto drop_new = [&](const Unsharing& change) VT_LOCKED {
    for (std::size_t i = 0; i < change.to.size(); ++i) {
      if (change.to[i] != page_at(change.run, i)) pages_.drop(change.to[i]);
    }
  };
  const auto put_back = [&](const Unsharing& change) VT_LOCKED {
    if (std::any_of(change.private_copies.begin(), change.private_copies.end(),
                    [](auto private_copies) { return private_copies != 0; })) {
      return replace(change.run, change.to);
    }
    try {
      driver_.remap(address(change.run), change.handles, Access::writable, change.from,
                    Access::copy_on_write);
      drop_new(change);
    } catch (const UndoFailed& error) {
      auto stuck = error.stuck.begin();
      for (std::size_t i = 0; i < change.to.size(); ++i) {
        if (stuck == error.stuck.end() || *stuck != i) {
          const std::size_t index = change.run.indices.begin + i;
          replace({change.run.row, {index, index + 1}}, {&change.to[i], 1});
          continue;
        }
        ++stuck;
        // Its old page is the entry's; which of the two is mapped here is unknown.
        if (change.to[i] != page_at(change.run, i)) {
          pages_.quarantine(change.to[i]);
          pages_.drop(change.to[i]);
        }
        quarantine(change.run, std::span(&i, 1));
      }
    } catch (const Error&) {
      replace(change.run, change.to);
    }
  };

  std::size_t done = 0;
  try {
    if (!runs.empty()) open_homes();
    for (const Run& run : runs) {
      const std::vector<std::uint8_t> private_copies = find_private_copies(run);
      for (std::size_t index = run.indices.begin; index < run.indices.end; ++index) {
        const bool was_copied = private_copies[index - run.indices.begin];
        Page* from = at(run.row, index).page;
        const bool alone = from->references == 1;
        std::vector<Page*> taken;
        if (alone) {
          taken.push_back(from);
        } else {
          const bool first = changes.empty() || changes.back().run.row != run.row;
          pages_.take(homes_[run.row], first ? nullptr : changes.back().to.back(), 1, taken);
        }
        Page* to = taken.back();
        // What the kernel copied cannot be put back, so a refused remap must leave it whole: one
        // kernel mapping each.
        const bool continues =
            index > run.indices.begin && changes.back().handles.back() + 1 == to->handle;
        if (index == run.indices.begin || (driver_.traits().adjacent_handles && !continues)) {
          changes.push_back({{run.row, {index, index}}, {}});
        }
        Unsharing& change = changes.back();
        change.run.indices.end = index + 1;
        change.private_copies.push_back(was_copied);
        change.to.push_back(to);
        change.handles.push_back(to->handle);
        change.from.push_back(from->handle);
        if (!alone || was_copied) {
          // From here on it holds neither its last owner's bytes nor, until all is copied, ours.
          to->last_owner = kNobody;
          copies.push_back({to->handle, address(run.row, index)});
        }
      }
    }
    if (!changes.empty()) {
      const Unlocked unlocked(lock);
      if (!copies.empty()) {
        const trace::Span span(trace::What::copy, copies.front().from, copies.size() * page_size_,
                               base_);
        driver_.copy_pages(copies, {});
      }
      for (; done < changes.size(); ++done) {
        const Unsharing& change = changes[done];
        driver_.remap(address(change.run), change.from, Access::copy_on_write, change.handles,
                      Access::writable);
      }
    }
    for (const Bytes bytes : stale) zero(bytes, stream);
  } catch (const UndoFailed& error) {
    const Unsharing& broken = changes[done];
    for (const std::size_t i : error.stuck) {
      if (broken.to[i] != page_at(broken.run, i)) pages_.quarantine(broken.to[i]);
    }
    for (std::size_t c = 0; c < done; ++c) put_back(changes[c]);
    for (std::size_t c = done; c < changes.size(); ++c) drop_new(changes[c]);
    quarantine(broken.run, error.stuck);
    throw;
  } catch (const TimedOut&) {
    // The copies may still run: what they write to is given up.
    for (const Unsharing& change : changes) {
      for (std::size_t i = 0; i < change.to.size(); ++i) {
        if (change.to[i] != page_at(change.run, i)) pages_.quarantine(change.to[i]);
      }
      drop_new(change);
    }
    throw;
  } catch (...) {
    // Where the zeroing of some positions may still run, their pages stay as they are.
    const bool over = done < changes.size() || stale.empty() || await_work(lock, stream);
    for (std::size_t c = 0; c < changes.size(); ++c) {
      if (c >= done) {
        drop_new(changes[c]);
      } else if (over) {
        put_back(changes[c]);
      } else {
        replace(changes[c].run, changes[c].to);
      }
    }
    throw;
  }
  for (const Unsharing& change : changes) replace(change.run, change.to);
}

// Makes runs writable again that were copy-on-write a moment ago and are not shared.
void Reservation::make_writable(std::span<const Run> runs) {
  for (const Run& run : runs) {
    const auto same = handles(run);
    std::vector<std::size_t> stuck;
    try {
      driver_.remap(address(run), same, Access::copy_on_write, same, Access::writable);
      continue;
    } catch (const UndoFailed& error) {
      stuck = error.stuck;
    } catch (const Error&) {
    }
    // copy-on-write for good: the next write through us unshares it.
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index)
      table_.at(run.row, index).state = EntryState::copy_on_write;
    copy_on_write_ += run.indices.size();
    quarantine(run, stuck);
  }
}

void Reservation::make_copy_on_write(PoolLock* lock, std::span<const Run> runs) {
  if (runs.empty()) return;
  std::vector<Handle> same;
  for (const Run& run : runs) {
    const auto of_run = handles(run);
    same.insert(same.end(), of_run.begin(), of_run.end());
  }
  std::size_t done = 0;
  try {
    std::optional<Unlocked> unlocked;
    if (lock != nullptr) unlocked.emplace(*lock);
    for (std::size_t at = 0; done < runs.size(); ++done) {
      const auto of_run = std::span<const Handle>(same).subspan(at, runs[done].indices.size());
      driver_.remap(address(runs[done]), of_run, Access::writable, of_run, Access::copy_on_write);
      at += of_run.size();
    }
  } catch (const UndoFailed& error) {
    quarantine(runs[done], error.stuck);  // copy-on-write or not: unknown
    make_writable(runs.first(done));
    throw;
  } catch (...) {
    make_writable(runs.first(done));
    throw;
  }
  for (const Run& run : runs) {
    for (std::size_t index = run.indices.begin; index < run.indices.end; ++index) {
      table_.at(run.row, index).state = EntryState::copy_on_write;
    }
    copy_on_write_ += run.indices.size();
  }
}

void Reservation::remap(std::span<const Change> changes) {
  if (changes.empty()) return;
  PageStore& pages = changes.front().range->pages_;
  Driver& driver = changes.front().range->driver_;
  struct Handles {
    std::vector<Handle> from, to;
    Access access;  // of what is there now
  };
  std::vector<Handles> handles;
  for (const auto& [range, run, to] : changes) {
    const auto from = range->handles(run);
    handles.push_back(
        {{from.begin(), from.end()}, {}, range->at(run.row, run.indices.begin).access()});
    for (const Page* page : to) handles.back().to.push_back(page->handle);
  }
  std::size_t done = 0;
  try {
    for (; done < changes.size(); ++done) {
      const auto& [from, to, access] = handles[done];
      driver.remap(changes[done].range->address(changes[done].run), from, access, to,
                   Access::copy_on_write);
    }
  } catch (const Error& error) {
    const auto give_up = [&pages](const Change& change) VT_LOCKED {
      for (Page* page : change.to) pages.quarantine(page);
      change.range->quarantine(change.run);
    };
    for (std::size_t i = 0; i < done; ++i) {
      const auto& [from, to, access] = handles[i];
      try {
        driver.remap(changes[i].range->address(changes[i].run), to, Access::copy_on_write, from,
                     access);
      } catch (const Error&) {
        give_up(changes[i]);
      }
    }
    if (dynamic_cast<const UndoFailed*>(&error)) give_up(changes[done]);
    throw;
  }
  for (const Change& change : changes) {
    for (Page* page : change.to) pages.share(page);
  }
  for (const auto& [range, run, to] : changes) {
    for (std::size_t i = 0; i < to.size(); ++i) {
      Entry& entry = range->table_.at(run.row, run.indices.begin + i);
      if (is_writable(entry)) ++range->copy_on_write_;
      pages.drop(entry.page);
      entry = {to[i], EntryState::copy_on_write};
    }
  }
}

}  // namespace vtensor
