#include "vmm/placement.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/errors.h"
#include "base/make_node.h"
#include "base/sparse_array.h"

namespace vtensor {

Page* Placement::new_record(Handle handle) {
  Page* page;
  if (!spare_.empty()) {
    page = spare_.back();
    spare_.pop_back();
    *page = Page{};
  } else {
    if (records_used_ == kRecordsAtOnce) {
      spare_.reserve((records_.size() + 1) * kRecordsAtOnce);
      records_.push_back(std::make_unique<Page[]>(kRecordsAtOnce));
      records_used_ = 0;
    }
    page = &records_.back()[records_used_++];
  }
  page->handle = handle;
  return page;
}

namespace {

class AdjacentPlacement final : public Placement {
 public:
  AdjacentPlacement(Driver& driver, SparePages& spare) : driver_(driver), spare_(spare) {}

  RowHome open_home(std::size_t pages) override {
    RowHome home{pages, {}};
    home.runs.reserve(2);
    if (HandleRun* run = open_idle(pages, 1)) home.runs.push_back(run);
    try {
      if (home.runs.empty() || home.runs[0]->length < pages) home.runs.push_back(open_run(pages));
    } catch (...) {
      close_home(home);
      throw;
    }
    return home;
  }

  void close_home(RowHome& home) override {
    for (HandleRun* run : home.runs) close(*run);
    home.runs.clear();
  }

  void pick(RowHome& home, const Page* previous, std::size_t n, std::vector<Page*>& out) override {
    std::size_t at = 0;
    while (n != 0) {
      if (at == home.runs.size()) home.runs.push_back(open_run(home.pages));
      const bool elsewhere =
          home.stitched && home.fresh == 0 && spare_.size() != 0 && home.runs[at]->spare == 0;
      Page* page = elsewhere ? pick_spare(previous) : pick_from(*home.runs[at], previous);
      if (!page) {
        ++at;
        continue;
      }
      if (!page->resident && home.fresh != 0) --home.fresh;
      page->references = 1;
      out.push_back(page);
      previous = page;
      --n;
    }
  }

  Page* blank() override { return nullptr; }

  void put_back(Page* page) override {
    HandleRun& run = run_of(page);
    std::size_t& from = page->resident ? run.spare_from : run.empty_from;
    from = std::min(from, index_in(run, page));
    run.spare += page->resident;
    --run.used;
    if (is_idle(run)) begin_idle(run);
  }

  void emptied(Page* page) override {
    HandleRun& run = run_of(page);
    if (is_idle(run)) leave(by_spare_, run.spare, run, run.by_spare);
    --run.spare;
    run.empty_from = std::min(run.empty_from, index_in(run, page));
    if (is_idle(run) && run.spare != 0) enter(by_spare_, run.spare, run, run.by_spare);
  }

 private:
  using Runs = std::map<Handle, HandleRun>;

  static bool is_idle(const HandleRun& run) { return !run.open && run.used == 0; }
  static std::size_t index_in(const HandleRun& run, const Page* page) {
    return page->handle - run.first;
  }
  HandleRun& run_of(const Page* page) { return std::prev(runs_.upper_bound(page->handle))->second; }

  // Prefers memory that is there to memory that must be made; then the neighbour of `previous`, so
  // that the kernel merges the two. Null if no page of the run is free.
  Page* pick_from(HandleRun& run, const Page* previous) {
    if (run.used == run.length) return nullptr;
    const Handle after = previous != nullptr ? previous->handle + 1 : run.first + run.length;
    Page* page = after - run.first < run.length ? pages_[after] : nullptr;
    if (run.spare != 0) {
      if (page == nullptr || page->references != 0 || !page->resident)
        page = pages_[run.first + first_free(run, true)];
      return take_spare(run, page);
    }
    Handle handle = after;
    if (after - run.first >= run.length || (page != nullptr && page->references != 0)) {
      handle = run.first + first_free(run, false);
      page = pages_[handle];
    }
    if (page == nullptr) page = make_record(handle);
    ++run.used;
    return page;
  }

  Page* make_record(Handle handle) {
    pages_.reserve(handle, handle + 1);
    return pages_.reserved(handle) = new_record(handle);
  }

  // Of any run; the neighbour of `previous` if it is among them. Requires: there are some.
  Page* pick_spare(const Page* previous) {
    Page* page = previous != nullptr ? pages_[previous->handle + 1] : nullptr;
    if (page == nullptr || page->references != 0 || !page->resident) page = spare_.oldest();
    HandleRun& run = run_of(page);
    if (is_idle(run)) end_idle(run);
    return take_spare(run, page);
  }

  Page* take_spare(HandleRun& run, Page* page) {
    --run.spare;
    ++run.used;
    spare_.remove(page);
    return page;
  }

  // A page without a record was never used.
  bool is_free(const HandleRun& run, std::size_t index, bool resident) const {
    const Page* const page = pages_[run.first + index];
    if (page == nullptr) return !resident;
    return page->references == 0 && page->resident == resident;
  }
  // Throws Error if there is none, which the run's counts deny.
  std::size_t first_free(HandleRun& run, bool resident) const {
    std::size_t& from = resident ? run.spare_from : run.empty_from;
    while (from < run.length && !is_free(run, from, resident)) ++from;
    if (from == run.length)
      throw Error("I5: the free pages from ", run.first, " on are miscounted");
    return from;
  }

  void close(HandleRun& run) {
    run.open = false;
    if (is_idle(run)) begin_idle(run);
  }
  // An idle run joins the idle runs beside it.
  void begin_idle(HandleRun& run) {
    const auto next = runs_.find(run.first + run.length);
    if (next != runs_.end() && is_idle(next->second)) {
      end_idle(next->second);
      join(run, next);
    }
    const auto at = runs_.find(run.first);
    const auto before = at != runs_.begin() ? std::prev(at) : runs_.end();
    const bool joins = before != runs_.end() && is_idle(before->second) &&
                       before->first + before->second.length == run.first;
    if (joins) {
      end_idle(before->second);
      join(before->second, at);
    }
    HandleRun& idle = joins ? before->second : run;
    enter(by_length_, idle.length, idle, idle.by_length);
    if (idle.spare != 0) enter(by_spare_, idle.spare, idle, idle.by_spare);
  }
  void end_idle(HandleRun& run) noexcept {
    leave(by_length_, run.length, run, run.by_length);
    if (run.spare != 0) leave(by_spare_, run.spare, run, run.by_spare);
  }
  using Node = RunsBySize::node_type;
  static void enter(RunsBySize& all, std::size_t size, const HandleRun& run, Node& node) noexcept {
    node.value() = {size, run.first};
    all.insert(std::move(node));
  }
  static void leave(RunsBySize& all, std::size_t size, const HandleRun& run, Node& node) noexcept {
    node = all.extract({size, run.first});
  }
  HandleRun& add_run(Handle first, std::size_t length) {
    HandleRun run{.first = first, .length = length, .open = true};
    run.by_length = make_node<RunsBySize>();
    run.by_spare = make_node<RunsBySize>();
    return runs_.emplace(first, std::move(run)).first->second;
  }

  void join(HandleRun& run, Runs::iterator next) {
    const HandleRun& other = next->second;
    if (run.spare == 0) run.spare_from = run.length + other.spare_from;
    if (run.spare == run.length) run.empty_from = run.length + other.empty_from;
    run.spare += other.spare;
    run.length += other.length;
    runs_.erase(next);
  }

  // The pages of an open run from `index` on, as a run of their own. Requires: none is in use.
  HandleRun& split(HandleRun& run, std::size_t index) {
    HandleRun& rest = add_run(run.first + index, run.length - index);
    rest.spare = run.spare;
    for (Handle at = pages_.next(run.first); at < rest.first; at = pages_.next(at + 1))
      rest.spare -= pages_[at] != nullptr && pages_[at]->resident;
    run.length = index;
    run.spare -= rest.spare;
    return rest;
  }

  // An idle run of `least` pages or more with the most kept memory, if a few looks find it; or else
  // the shortest that has `pages`. Null if there is neither.
  HandleRun* best_idle(std::size_t pages, std::size_t least) {
    std::size_t looks = kMostLooks;
    for (auto most = by_spare_.rbegin(); most != by_spare_.rend() && looks != 0; ++most, --looks) {
      HandleRun& run = runs_.at(most->second);
      if (run.length >= least) return &run;
    }
    const auto found = by_length_.lower_bound({pages, 0});
    return found != by_length_.end() ? &runs_.at(found->second) : nullptr;
  }

  // The best idle run, of which up to `pages` pages are opened, from the first spare one on if
  // there is one. Null if there is none.
  HandleRun* open_idle(std::size_t pages, std::size_t least) {
    HandleRun* run = best_idle(pages, least);
    if (run == nullptr) return nullptr;
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

  // A run of `pages` pages. Makes new handles only if those that exist are in use.
  HandleRun* open_run(std::size_t pages) {
    if (HandleRun* idle = open_idle(pages, pages)) return idle;
    const Handle first = driver_.create(pages);
    return &add_run(first, pages);
  }

  static constexpr std::size_t kMostLooks = 32;

  Driver& driver_;
  SparePages& spare_;
  SparseArray<Page*, 32> pages_;  // by handle
  Runs runs_;                     // by their first handles
  // Idle runs by length, and those with spare pages by their number; each with its first handle.
  RunsBySize by_length_, by_spare_;
};

class UnorderedPlacement final : public Placement {
 public:
  UnorderedPlacement(Driver& driver, SparePages& spare) : driver_(driver), spare_(spare) {}

  RowHome open_home(std::size_t pages) override { return RowHome{pages, {}}; }
  void close_home(RowHome&) override {}

  void pick(RowHome&, const Page*, std::size_t n, std::vector<Page*>& out) override {
    for (; n != 0; --n) {
      Page* page = spare_.newest();
      if (page) {
        spare_.remove(page);
      } else {
        page = blank();
        try {
          page->handle = driver_.create(1);
        } catch (...) {
          recycle_record(page);
          throw;
        }
      }
      page->references = 1;
      out.push_back(page);
    }
  }

  Page* blank() override {
    Page* page = new_record(0);
    page->dirty = !driver_.traits().created_zero;
    page->resident = true;
    return page;
  }

  void put_back(Page*) override {}
  void emptied(Page* page) override { recycle_record(page); }

 private:
  Driver& driver_;
  SparePages& spare_;
};

}  // namespace

std::unique_ptr<Placement> make_placement(Driver& driver, SparePages& spare) {
  if (driver.traits().adjacent_handles) return std::make_unique<AdjacentPlacement>(driver, spare);
  return std::make_unique<UnorderedPlacement>(driver, spare);
}

}  // namespace vtensor
