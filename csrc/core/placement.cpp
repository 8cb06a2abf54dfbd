#include "core/placement.h"

#include <algorithm>
#include <iterator>

namespace vtensor {

Page* Placement::new_record(Handle handle) {
  Page* page;
  if (spare_.empty()) {
    page = &records_.emplace_back();
  } else {
    page = spare_.back();
    spare_.pop_back();
    *page = Page{};
  }
  page->handle = handle;
  return page;
}

namespace {

class AdjacentPlacement final : public Placement {
 public:
  explicit AdjacentPlacement(Driver& driver) : driver_(driver) {}

  RowHome open_home(std::size_t pages) override { return RowHome{pages, {open_run(pages)}}; }

  void close_home(RowHome& home) override {
    for (HandleRun* run : home.runs) {
      run->open = false;
      if (run->used == 0) idle_.push_back(run);
    }
    home.runs.clear();
  }

  Page* pick(RowHome& home, const Page* previous) override {
    for (HandleRun* run : home.runs) {
      if (Page* page = pick_from(*run, previous)) return page;
    }
    home.runs.push_back(open_run(home.pages));
    return pick_from(*home.runs.back(), previous);
  }

  void put_back(Page* page) override {
    HandleRun* run = page->run;
    (page->resident ? run->free_kept : run->free_empty).insert(page->handle - run->first);
    if (--run->used == 0 && !run->open) idle_.push_back(run);
  }

  void emptied(Page* page) override {
    const std::size_t index = page->handle - page->run->first;
    page->run->free_kept.erase(index);
    page->run->free_empty.insert(index);
  }

 private:
  // Memory that is there before memory that must be made; then the neighbour of `previous`, so that the
  // kernel merges the two.
  Page* pick_from(HandleRun& run, const Page* previous) {
    const bool has_neighbour = previous && previous->run == &run;
    const std::size_t neighbour = has_neighbour ? previous->handle - run.first + 1 : 0;
    const auto from = [&run](std::set<std::size_t>& free, std::set<std::size_t>::iterator at) {
      Page* page = run.pages[*at];
      free.erase(at);
      ++run.used;
      return page;
    };
    if (!run.free_kept.empty()) {
      const auto at = run.free_kept.find(neighbour);
      return from(run.free_kept, at != run.free_kept.end() ? at : run.free_kept.begin());
    }
    if (has_neighbour && !run.free_empty.empty()) {
      const auto at = run.free_empty.find(neighbour);
      if (at != run.free_empty.end()) return from(run.free_empty, at);
    }
    if (run.pages.size() < run.length) {
      Page* page = new_record(run.first + run.pages.size());
      page->run = &run;
      run.pages.push_back(page);
      ++run.used;
      return page;
    }
    return run.free_empty.empty() ? nullptr : from(run.free_empty, run.free_empty.begin());
  }

  HandleRun* open_run(std::size_t pages) {
    const auto best = std::max_element(
        idle_.begin(), idle_.end(), [pages](const HandleRun* a, const HandleRun* b) {
          const auto rank = [pages](const HandleRun* run) {
            return run->length < pages ? -1 : static_cast<std::ptrdiff_t>(run->free_kept.size());
          };
          return rank(a) < rank(b);
        });
    HandleRun* run;
    if (best != idle_.end() && (*best)->length >= pages) {
      run = *best;
      idle_.erase(best);
      split(*run, pages);
    } else {
      run = &runs_.emplace_back();
      run->first = driver_.create(pages);
      run->length = pages;
    }
    run->open = true;
    return run;
  }

  // Leaves `pages` pages in the run and makes an idle run of what lies behind them.
  void split(HandleRun& run, std::size_t pages) {
    if (run.length == pages) return;
    HandleRun& rest = runs_.emplace_back();
    rest.first = run.first + pages;
    rest.length = run.length - pages;
    run.length = pages;
    if (run.pages.size() > pages) {
      rest.pages.assign(run.pages.begin() + static_cast<std::ptrdiff_t>(pages), run.pages.end());
      run.pages.resize(pages);
      for (Page* page : rest.pages) page->run = &rest;
      const auto move_tail = [pages](std::set<std::size_t>& from, std::set<std::size_t>& to) {
        const auto tail = from.lower_bound(pages);
        std::transform(tail, from.end(), std::inserter(to, to.end()),
                       [pages](std::size_t index) { return index - pages; });
        from.erase(tail, from.end());
      };
      move_tail(run.free_kept, rest.free_kept);
      move_tail(run.free_empty, rest.free_empty);
    }
    idle_.push_back(&rest);
  }

  Driver& driver_;
  std::list<HandleRun> runs_;
  std::vector<HandleRun*> idle_;  // closed, and none of their pages in use
};

class UnorderedPlacement final : public Placement {
 public:
  UnorderedPlacement(Driver& driver, const KeptPages& kept) : driver_(driver), kept_(kept) {}

  RowHome open_home(std::size_t pages) override { return RowHome{pages, {}}; }
  void close_home(RowHome&) override {}

  Page* pick(RowHome&, const Page*) override {
    if (Page* page = kept_.newest()) return page;
    Page* page = new_record(0);
    try {
      page->handle = driver_.create(1);
    } catch (...) {
      recycle_record(page);
      throw;
    }
    page->dirty = !driver_.traits().created_zero;
    return page;
  }

  void put_back(Page*) override {}
  void emptied(Page* page) override { recycle_record(page); }

 private:
  Driver& driver_;
  const KeptPages& kept_;
};

}  // namespace

std::unique_ptr<Placement> make_placement(Driver& driver, const KeptPages& kept) {
  if (driver.traits().adjacent_handles) return std::make_unique<AdjacentPlacement>(driver);
  return std::make_unique<UnorderedPlacement>(driver, kept);
}

}  // namespace vtensor
