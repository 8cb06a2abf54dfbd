#include "core/placement.h"

#include <algorithm>
#include <utility>

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

class AdjacentPlacement final : public Placement {
 public:
  AdjacentPlacement(Driver& driver, KeptPages& kept) : driver_(driver), kept_(kept) {}

  RowHome open_home(std::size_t pages) override {
    RowHome home{pages, {}};
    home.runs.reserve(2);
    if (HandleRun* run = adopt_idle(pages, 1)) home.runs.push_back(run);
    if (home.runs.empty() || home.runs[0]->length < pages) home.runs.push_back(open_run(pages));
    return home;
  }

  void close_home(RowHome& home) override {
    for (HandleRun* run : home.runs) {
      run->open = false;
      if (run->used == 0) idle_.push_back(run);
    }
    home.runs.clear();
  }

  void pick(RowHome& home, const Page* previous, std::size_t n, std::vector<Page*>& out) override {
    std::size_t at = 0;
    while (n != 0) {
      if (at == home.runs.size()) home.runs.push_back(open_run(home.pages));
      Page* page = pick_from(*home.runs[at], previous);
      if (!page) {
        ++at;
        continue;
      }
      page->references = 1;
      ++page->run->used;
      out.push_back(page);
      previous = page;
      --n;
    }
  }

  Page* adopt(Handle) override { return nullptr; }

  void put_back(Page* page) override {
    HandleRun* run = page->run;
    const std::size_t index = page->handle - run->first;
    if (page->resident) {
      ++run->free_kept;
      run->kept_from = std::min(run->kept_from, index);
    } else {
      ++run->free_empty;
      run->empty_from = std::min(run->empty_from, index);
    }
    if (--run->used == 0 && !run->open) idle_.push_back(run);
  }

  void emptied(Page* page) override {
    HandleRun* run = page->run;
    --run->free_kept;
    ++run->free_empty;
    run->empty_from = std::min<std::size_t>(run->empty_from, page->handle - run->first);
  }

 private:
  // Memory that is there before memory that must be made; then the neighbour of `previous`, so that
  // the kernel merges the two.
  Page* pick_from(HandleRun& run, const Page* previous) {
    const std::size_t neighbour =
        previous && previous->run == &run ? previous->handle - run.first + 1 : run.length;
    Page* beside = neighbour < run.pages.size() && run.pages[neighbour]->references == 0
                       ? run.pages[neighbour]
                       : nullptr;
    if (run.free_kept != 0) {
      if (!beside || !beside->resident) beside = first_free(run, run.kept_from, true);
      --run.free_kept;
      kept_.remove(beside);
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

  static Page* first_free(const HandleRun& run, std::size_t& from, bool resident) {
    while (run.pages[from]->references != 0 || run.pages[from]->resident != resident) ++from;
    return run.pages[from];
  }

  // Of the idle runs of `least` pages or more that with the most kept memory, or else one that is
  // long enough, cut to `pages`; null where none is.
  HandleRun* adopt_idle(std::size_t pages, std::size_t least) {
    const auto rank = [pages, least](const HandleRun* run) {
      if (run->length < least) return std::pair(std::size_t{0}, false);
      return std::pair(run->free_kept, run->length >= pages);
    };
    const auto best =
        std::max_element(idle_.begin(), idle_.end(),
                         [&](const HandleRun* a, const HandleRun* b) { return rank(a) < rank(b); });
    if (best == idle_.end() || rank(*best) == std::pair(std::size_t{0}, false)) return nullptr;
    HandleRun* run = *best;
    if (run->length > pages && run->pages.size() == run->length) {
      run = cut(*run, pages);
    } else {
      if (run->length > pages) split(*run, pages);
      std::erase(idle_, run);
    }
    run->open = true;
    return run;
  }

  // A run of `pages` pages: new handles only where those that exist are in use.
  HandleRun* open_run(std::size_t pages) {
    HandleRun* idle = adopt_idle(pages, pages);
    if (!idle && idle_.size() >= join_at_) {
      join_idle();
      idle = adopt_idle(pages, pages);
    }
    if (idle) return idle;
    HandleRun* run = &runs_.emplace_back();
    run->first = driver_.create(pages);
    run->length = pages;
    run->open = true;
    return run;
  }

  // Leaves `pages` pages in an idle run and makes another of what lies behind them.
  void split(HandleRun& run, std::size_t pages) {
    idle_.reserve(idle_.size() + 1);
    idle_.push_back(cut(run, run.length - pages));
  }

  // Takes the last `pages` pages from an idle run, as a run of their own: joined runs are long, and
  // what takes a short one from them must not touch all of their records.
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
      ++(page->resident ? last.free_kept : last.free_empty);
    }
    run.free_kept -= last.free_kept;
    run.free_empty -= last.free_empty;
    // A short run keeps no room for the records of a long one.
    if (run.pages.capacity() > 2 * run.pages.size() + kMostUnused) run.pages.shrink_to_fit();
    return &last;
  }

  // Makes one of idle runs that lie side by side, as rows of other lengths have split them: their
  // number stays within what is in use. Seldom: where the same lengths return, none is missing.
  void join_idle() {
    std::sort(idle_.begin(), idle_.end(),
              [](const HandleRun* a, const HandleRun* b) { return a->first < b->first; });
    std::vector<HandleRun*> joined;
    for (HandleRun* run : idle_) {
      if (joined.empty() || !append(*joined.back(), *run)) joined.push_back(run);
    }
    idle_ = std::move(joined);
    runs_.remove_if([](const HandleRun& run) { return run.length == 0; });
    join_at_ = std::max(kJoinAt, 2 * idle_.size());
  }

  // Moves all of `next` to the end of `run`; false where it does not follow it, or where that takes
  // many records of pages that nobody has used.
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
    run.free_kept += next.free_kept;
    run.free_empty += next.free_empty + gap;
    run.kept_from = run.empty_from = 0;
    run.length += next.length;
    next.length = 0;
    return true;
  }

  static constexpr std::size_t kJoinAt = 64;
  static constexpr std::size_t kMostUnused = 1024;

  Driver& driver_;
  KeptPages& kept_;
  std::list<HandleRun> runs_;
  std::vector<HandleRun*> idle_;   // closed, and none of their pages in use
  std::size_t join_at_ = kJoinAt;  // so many idle runs that joining them is worth a look
};

class UnorderedPlacement final : public Placement {
 public:
  UnorderedPlacement(Driver& driver, KeptPages& kept) : driver_(driver), kept_(kept) {}

  RowHome open_home(std::size_t pages) override { return RowHome{pages, {}}; }
  void close_home(RowHome&) override {}

  void pick(RowHome&, const Page*, std::size_t n, std::vector<Page*>& out) override {
    for (; n != 0; --n) {
      Page* page = kept_.newest();
      if (page) {
        kept_.remove(page);
      } else {
        page = adopt(driver_.create(1));
      }
      page->references = 1;
      out.push_back(page);
    }
  }

  Page* adopt(Handle handle) override {
    Page* page = new_record(handle);
    page->dirty = !driver_.traits().created_zero;
    page->resident = true;
    return page;
  }

  void put_back(Page*) override {}
  void emptied(Page* page) override { recycle_record(page); }

 private:
  Driver& driver_;
  KeptPages& kept_;
};

}  // namespace

std::unique_ptr<Placement> make_placement(Driver& driver, KeptPages& kept) {
  if (driver.traits().adjacent_handles) return std::make_unique<AdjacentPlacement>(driver, kept);
  return std::make_unique<UnorderedPlacement>(driver, kept);
}

}  // namespace vtensor
