#include "vmm/placement.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace vtensor {

Page* Placement::new_record(Handle handle) {
  Page* page;
  if (!spare_.empty()) {
    page = spare_.back();
    spare_.pop_back();
    *page = Page{};
  } else {
    if (records_used_ == kRecordsAtOnce) {
      records_.push_back(std::make_unique<Page[]>(kRecordsAtOnce));
      records_used_ = 0;
    }
    page = &records_.back()[records_used_++];
  }
  page->handle = handle;
  return page;
}

namespace {

// Closed runs, none of whose pages is in use. A run on it changes only between `remove` and `add`.
class IdleRuns {
 public:
  void add(HandleRun* run) {
    by_length_.insert(run);
    if (run->free_spare != 0) by_spare_.insert(run);
  }
  void remove(HandleRun* run) {
    by_length_.erase(run);
    by_spare_.erase(run);
  }
  std::size_t size() const { return by_length_.size(); }

  // One of `least` pages or more with the most kept memory, if a few looks find it; or else the
  // shortest that has `pages`. Null if there is neither.
  HandleRun* best(std::size_t pages, std::size_t least) const {
    std::size_t looks = kMostLooks;
    for (HandleRun* run : by_spare_) {
      if (run->length >= least) return run;
      if (--looks == 0) break;
    }
    const auto found = by_length_.lower_bound(pages);
    return found == by_length_.end() ? nullptr : *found;
  }

  // Gives all of them out, in the order of their handles.
  std::vector<HandleRun*> take_all() {
    std::vector<HandleRun*> all(by_length_.begin(), by_length_.end());
    std::sort(all.begin(), all.end(),
              [](const HandleRun* a, const HandleRun* b) { return a->first < b->first; });
    by_length_.clear();
    by_spare_.clear();
    return all;
  }

 private:
  static constexpr std::size_t kMostLooks = 32;

  struct Shorter {
    using is_transparent = void;
    bool operator()(const HandleRun* a, const HandleRun* b) const {
      return std::pair(a->length, a->first) < std::pair(b->length, b->first);
    }
    bool operator()(const HandleRun* run, std::size_t pages) const { return run->length < pages; }
    bool operator()(std::size_t pages, const HandleRun* run) const { return pages < run->length; }
  };
  struct SparesMore {
    bool operator()(const HandleRun* a, const HandleRun* b) const {
      return std::tuple(b->free_spare, b->length, a->first) <
             std::tuple(a->free_spare, a->length, b->first);
    }
  };
  std::set<HandleRun*, Shorter> by_length_;
  std::set<HandleRun*, SparesMore> by_spare_;  // those that keep any
};

class AdjacentPlacement final : public Placement {
 public:
  AdjacentPlacement(Driver& driver, SparePages& spare) : driver_(driver), spare_(spare) {}

  RowHome open_home(std::size_t pages) override {
    RowHome home{pages, {}};
    home.runs.reserve(2);
    if (HandleRun* run = reuse_idle(pages, 1)) home.runs.push_back(run);
    if (home.runs.empty() || home.runs[0]->length < pages) home.runs.push_back(open_run(pages));
    return home;
  }

  void close_home(RowHome& home) override {
    for (HandleRun* run : home.runs) {
      run->open = false;
      if (run->used == 0) idle_.add(run);
    }
    home.runs.clear();
  }

  void pick(RowHome& home, const Page* previous, std::size_t n, std::vector<Page*>& out) override {
    std::size_t at = 0;
    while (n != 0) {
      if (at == home.runs.size()) home.runs.push_back(open_run(home.pages));
      const bool elsewhere =
          home.stitched && home.fresh == 0 && spare_.size() != 0 && home.runs[at]->free_spare == 0;
      Page* page = elsewhere ? pick_spare(previous) : pick_from(*home.runs[at], previous);
      if (!page) {
        ++at;
        continue;
      }
      if (!page->resident && home.fresh != 0) --home.fresh;
      page->references = 1;
      ++page->run->used;
      out.push_back(page);
      previous = page;
      --n;
    }
  }

  Page* reuse(Handle) override { return nullptr; }

  void put_back(Page* page) override {
    HandleRun* run = page->run;
    const std::size_t index = page->handle - run->first;
    if (page->resident) {
      ++run->free_spare;
      run->spare_from = std::min(run->spare_from, index);
    } else {
      ++run->free_empty;
      run->empty_from = std::min(run->empty_from, index);
    }
    if (--run->used == 0 && !run->open) idle_.add(run);
  }

  void emptied(Page* page) override {
    HandleRun* run = page->run;
    const bool idle = run->used == 0 && !run->open;
    if (idle) idle_.remove(run);
    --run->free_spare;
    ++run->free_empty;
    run->empty_from = std::min<std::size_t>(run->empty_from, page->handle - run->first);
    if (idle) idle_.add(run);
  }

 private:
  // Prefers memory that is there to memory that must be made; then the neighbour of `previous`, so
  // that the kernel merges the two.
  Page* pick_from(HandleRun& run, const Page* previous) {
    const std::size_t neighbour =
        previous && previous->run == &run ? previous->handle - run.first + 1 : run.length;
    Page* beside = neighbour < run.pages.size() && run.pages[neighbour]->references == 0
                       ? run.pages[neighbour]
                       : nullptr;
    if (run.free_spare != 0) {
      if (!beside || !beside->resident) beside = first_free(run, run.spare_from, true);
      --run.free_spare;
      spare_.remove(beside);
      return beside;
    }
    if (!beside && run.pages.size() < run.length) {
      Page* page = new_record(run.first + run.pages.size());
      page->run = &run;
      run.pages.push_back(page);
      return page;
    }
    if (!beside && run.free_empty != 0) beside = first_free(run, run.empty_from, false);
    if (beside) --run.free_empty;
    return beside;
  }

  // Of any run; the neighbour of `previous` if it is among them. Requires: there are some.
  Page* pick_spare(const Page* previous) {
    Page* page = spare_.oldest();
    if (previous != nullptr) {
      const std::vector<Page*>& pages = previous->run->pages;
      const std::size_t after = previous->handle - previous->run->first + 1;
      if (after < pages.size() && pages[after]->references == 0 && pages[after]->resident)
        page = pages[after];
    }
    HandleRun* const run = page->run;
    if (run->used == 0 && !run->open) idle_.remove(run);
    --run->free_spare;
    spare_.remove(page);
    return page;
  }

  static Page* first_free(const HandleRun& run, std::size_t& from, bool resident) {
    while (run.pages[from]->references != 0 || run.pages[from]->resident != resident) ++from;
    return run.pages[from];
  }

  // The best of the idle runs, see IdleRuns, cut to `pages`; null if there is none.
  HandleRun* reuse_idle(std::size_t pages, std::size_t least) {
    HandleRun* const best = idle_.best(pages, least);
    if (best == nullptr) return nullptr;
    HandleRun* run = best;
    HandleRun* rest = nullptr;
    idle_.remove(best);
    try {
      if (best->length > pages) {
        // Of a run whose records all exist the last pages, so that the others keep theirs.
        const bool whole = best->pages.size() == best->length;
        HandleRun* const last = cut(*best, whole ? pages : best->length - pages);
        run = whole ? last : best;
        rest = whole ? best : last;
      }
    } catch (...) {
      idle_.add(best);
      throw;
    }
    run->open = true;
    if (rest != nullptr) idle_.add(rest);
    return run;
  }

  // A run of `pages` pages. Makes new handles only if those that exist are in use.
  HandleRun* open_run(std::size_t pages) {
    HandleRun* idle = reuse_idle(pages, pages);
    if (!idle && idle_.size() >= join_at_) {
      join_idle();
      idle = reuse_idle(pages, pages);
    }
    if (idle) return idle;
    HandleRun* run = &runs_.emplace_back();
    run->first = driver_.create(pages);
    run->length = pages;
    run->open = true;
    return run;
  }

  // Takes the last `pages` pages from an idle run, as a run of their own. Joined runs are long, so
  // taking a short one must not touch all of their records.
  HandleRun* cut(HandleRun& run, std::size_t pages) {
    const std::size_t left = run.length - pages;
    std::vector<Page*> records;
    if (run.pages.size() > left)
      records.assign(run.pages.begin() + static_cast<std::ptrdiff_t>(left), run.pages.end());
    HandleRun& last = runs_.emplace_back();
    last.first = run.first + left;
    last.length = pages;
    last.pages = std::move(records);
    run.length = left;
    run.pages.resize(run.pages.size() - last.pages.size());
    for (Page* page : last.pages) {
      page->run = &last;
      ++(page->resident ? last.free_spare : last.free_empty);
    }
    run.free_spare -= last.free_spare;
    run.free_empty -= last.free_empty;
    // A short run keeps no room for the records of a long one.
    if (run.pages.capacity() > 2 * run.pages.size() + kMostUnused) run.pages.shrink_to_fit();
    return &last;
  }

  // Joins idle runs that lie side by side, because rows of other lengths have split them. So their
  // number stays within what is in use. Seldom: if the same lengths return, no run is missing.
  void join_idle() {
    std::vector<HandleRun*> joined;
    for (HandleRun* run : idle_.take_all()) {
      if (joined.empty() || !append(*joined.back(), *run)) joined.push_back(run);
    }
    for (HandleRun* run : joined) idle_.add(run);
    runs_.remove_if([](const HandleRun& run) { return run.length == 0; });
    join_at_ = std::max(kJoinAt, 2 * idle_.size());
  }

  // Moves all of `next` to the end of `run`; false if it does not follow it, or if that takes many
  // records of pages that were never used.
  bool append(HandleRun& run, HandleRun& next) {
    if (run.first + run.length != next.first) return false;
    const std::size_t gap = next.pages.empty() ? 0 : run.length - run.pages.size();
    if (gap > kMostUnused) return false;
    for (std::size_t i = 0; i < gap; ++i) {
      Page* page = new_record(run.first + run.pages.size());
      page->run = &run;
      run.pages.push_back(page);
    }
    for (Page* page : next.pages) page->run = &run;
    run.pages.insert(run.pages.end(), next.pages.begin(), next.pages.end());
    run.free_spare += next.free_spare;
    run.free_empty += next.free_empty + gap;
    run.spare_from = run.empty_from = 0;
    run.length += next.length;
    next.length = 0;
    return true;
  }

  static constexpr std::size_t kJoinAt = 64;
  static constexpr std::size_t kMostUnused = 1024;

  Driver& driver_;
  SparePages& spare_;
  std::list<HandleRun> runs_;
  IdleRuns idle_;
  std::size_t join_at_ = kJoinAt;  // idle runs from which joining them is tried
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
        page = reuse(driver_.create(1));
      }
      page->references = 1;
      out.push_back(page);
    }
  }

  Page* reuse(Handle handle) override {
    Page* page = new_record(handle);
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
