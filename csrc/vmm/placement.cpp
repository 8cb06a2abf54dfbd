#include "vmm/placement.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/errors.h"
#include "base/make_node.h"

namespace vtensor {

namespace {

bool is_idle(const HandleRun& run) { return !run.open && run.used == 0; }

std::tuple<std::size_t, std::size_t, Handle> idle_key(const HandleRun& run) {
  return {run.spare, run.length, run.first};
}

}  // namespace

// -- pages

Page* Placement::new_record(Handle handle) {
  Page* page;
  if (!unused_records_.empty()) {
    page = unused_records_.back();
    unused_records_.pop_back();
    *page = Page{};
  } else {
    if (records_used_ == kRecordsAtOnce) {
      unused_records_.reserve((records_.size() + 1) * kRecordsAtOnce);
      records_.push_back(std::make_unique<Page[]>(kRecordsAtOnce));
      records_used_ = 0;
    }
    page = &records_.back()[records_used_++];
  }
  page->handle = handle;
  return page;
}

Page* Placement::blank() {
  Page* const page = new_record(0);
  page->references = 1;
  page->dirty = true;  // new memory may show old bytes
  page->resident = page->fresh = true;
  return page;
}

void Placement::pick(RowHome& home, const Page* previous, std::size_t n, std::size_t fresh,
                     std::vector<Page*>& out) {
  if (!driver_.traits().adjacent_handles) {
    for (; n != 0; --n) {
      if (spare_.newest() != nullptr) {
        out.push_back(spare_.newest());
        take_spare(out.back());
      } else {
        out.push_back(blank());
        out.back()->resident = false;  // until create() has succeeded
        out.back()->handle = driver_.create(1);
        out.back()->resident = true;
      }
    }
    return;
  }
  for (std::size_t at = 0; n != 0;) {
    if (at == home.runs.size()) {
      home.runs.reserve(at + 1);
      home.runs.push_back(open_run(home.pages, at == 0 ? 1 : home.pages));
    }
    HandleRun& run = *home.runs[at];
    const std::size_t before = out.size();
    if (fresh == 0 && run.spare == 0 && spare_.size() != 0) {
      Page* page = previous != nullptr ? pages_[previous->handle + 1] : nullptr;
      if (page == nullptr || page->references != 0 || !page->resident) page = spare_.oldest();
      take_spare(page);
      out.push_back(page);
    } else if (run.used != run.length) {
      pick_from(run, previous, run.spare != 0 || fresh == 0 ? n : std::min(n, fresh), out);
    } else {
      ++at;
      continue;
    }
    const std::size_t picked = out.size() - before;
    previous = out.back();
    if (!previous->resident && fresh != 0) fresh -= picked;
    n -= picked;
  }
}

// Adds up to `n` neighbouring pages. Prefers pages with memory to pages without; then the neighbour
// of `previous`, so that the kernel merges their mappings. Requires: a page of the run is free.
void Placement::pick_from(HandleRun& run, const Page* previous, std::size_t n,
                          std::vector<Page*>& out) {
  const bool resident = run.spare != 0;
  const std::size_t after = previous != nullptr ? previous->handle + 1 - run.first : run.length;
  const bool continues = after < run.length && is_free(run, after, resident);
  const std::size_t first = continues ? after : first_free(run, resident);
  const Handle end = run.first + std::min(run.length, first + n);
  if (!resident) pages_.reserve(run.first + first, end);  // spare pages have records
  for (Handle handle = run.first + first; handle < end; ++handle) {
    if (!is_free(run, handle - run.first, resident)) return;
    Page*& page = pages_.reserved(handle);
    if (page == nullptr) page = new_record(handle);
    begin_use(run, page);
    out.push_back(page);
  }
}

void Placement::begin_use(HandleRun& run, Page* page) noexcept {
  page->references = 1;
  ++run.used;
  if (!page->resident) return;
  --run.spare;
  spare_.remove(page);
}

void Placement::take_spare(Page* page) noexcept {
  if (!driver_.traits().adjacent_handles) {
    page->references = 1;
    return spare_.remove(page);
  }
  HandleRun& run = run_of(page);
  if (is_idle(run)) end_idle(run);
  begin_use(run, page);
}

void Placement::put_back(Page* page) noexcept {
  page->references = 0;
  if (page->resident) spare_.push(page);
  if (!driver_.traits().adjacent_handles) {
    if (!page->resident) unused_records_.push_back(page);
    return;
  }
  HandleRun& run = run_of(page);
  std::size_t& from = page->resident ? run.spare_from : run.empty_from;
  from = std::min<std::size_t>(from, page->handle - run.first);
  run.spare += page->resident;
  --run.used;
  if (is_idle(run)) begin_idle(run);
}

// A page without a record was never used.
bool Placement::is_free(const HandleRun& run, std::size_t index, bool resident) const {
  const Page* const page = pages_[run.first + index];
  if (page == nullptr) return !resident;
  return page->references == 0 && page->resident == resident;
}

// The first free page, resident or not. Throws Error if there is none, against the run's counts.
std::size_t Placement::first_free(HandleRun& run, bool resident) const {
  std::size_t& from = resident ? run.spare_from : run.empty_from;
  while (from < run.length && !is_free(run, from, resident)) {
    ++from;
    // Pages without a record have no memory.
    if (resident) from = std::min(run.length, pages_.next(run.first + from) - run.first);
  }
  if (from == run.length) throw Error("I5: the free pages from ", run.first, " on are miscounted");
  return from;
}

// -- runs

HandleRun& Placement::run_of(const Page* page) {
  return std::prev(runs_.upper_bound(page->handle))->second;
}

void Placement::close(RowHome& home) noexcept {
  for (HandleRun* run : home.runs) close(*run);
  home.runs.clear();
}

void Placement::close(HandleRun& run) noexcept {
  run.open = false;
  if (is_idle(run)) begin_idle(run);
}

// The run is idle: it joins adjacent idle runs.
void Placement::begin_idle(HandleRun& run) noexcept {
  const auto joins = [](Runs::iterator one, Runs::iterator next) {
    return is_idle(one->second) && is_idle(next->second) &&
           one->first + one->second.length == next->first;
  };
  auto at = runs_.find(run.first);
  if (const auto next = std::next(at); next != runs_.end() && joins(at, next)) join(at, next);
  if (at != runs_.begin() && joins(std::prev(at), at)) {
    --at;
    join(at, std::next(at));
  }
  at->second.idle.value() = idle_key(at->second);
  idle_.insert(std::move(at->second.idle));
}

void Placement::end_idle(HandleRun& run) noexcept {
  if (run.idle.empty()) run.idle = idle_.extract(idle_key(run));
}

void Placement::join(Runs::iterator at, Runs::iterator next) noexcept {
  HandleRun& run = at->second;
  const HandleRun& other = next->second;
  end_idle(run);
  end_idle(next->second);
  if (run.spare == 0) run.spare_from = run.length + other.spare_from;
  if (run.spare == run.length) run.empty_from = run.length + other.empty_from;
  run.spare += other.spare;
  run.length += other.length;
  runs_.erase(next);
}

HandleRun& Placement::add_run(Handle first, std::size_t length) {
  HandleRun run{.first = first, .length = length, .open = true};
  run.idle = make_node<IdleRuns>();
  return runs_.emplace(first, std::move(run)).first->second;
}

// Cuts an open run: the pages from `index` on become a run of their own. Requires: none is in use.
HandleRun& Placement::split(HandleRun& run, std::size_t index) {
  HandleRun& rest = add_run(run.first + index, run.length - index);
  rest.spare = run.spare;
  for (Handle at = pages_.next(run.first); at < rest.first; at = pages_.next(at + 1))
    rest.spare -= pages_[at] != nullptr && pages_[at]->resident;
  run.length = index;
  run.spare -= rest.spare;
  return rest;
}

// The idle run with most spare pages that has at least `least` pages, if a few looks find one; else
// the shortest idle run without spare pages that has `pages`; else null.
HandleRun* Placement::best_idle(std::size_t pages, std::size_t least) {
  std::size_t looks = kMostLooks;
  for (auto most = idle_.rbegin(); most != idle_.rend() && looks != 0; ++most, --looks) {
    const auto [spare, length, first] = *most;
    if (spare == 0) break;
    if (length >= least) return &runs_.at(first);
  }
  const auto found = idle_.lower_bound({0, pages, 0});
  const bool any = found != idle_.end() && std::get<0>(*found) == 0;
  return any ? &runs_.at(std::get<2>(*found)) : nullptr;
}

// Opens up to `pages` pages of the best idle run, from its first spare page on if it has one. Makes
// new handles only if no idle run will do.
HandleRun* Placement::open_run(std::size_t pages, std::size_t least) {
  HandleRun* run = best_idle(pages, least);
  if (run == nullptr) {
    const Handle first = driver_.create(pages);
    return &add_run(first, pages);
  }
  end_idle(*run);
  run->open = true;
  try {
    if (run->length > pages && run->spare != 0) {
      const std::size_t before = std::min(first_free(*run, true), run->length - pages);
      if (before != 0) {
        HandleRun& rest = split(*run, before);
        close(*std::exchange(run, &rest));
      }
    }
    if (run->length > pages) close(split(*run, pages));
  } catch (...) {
    close(*run);
    throw;
  }
  return run;
}

}  // namespace vtensor
