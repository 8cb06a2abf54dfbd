#include "tensor/buffer.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <utility>

#include "base/align.h"
#include "base/errors.h"
#include "base/process.h"
#include "base/trace.h"
#include "vmm/copy_on_write.h"
#include "vmm/pending_work.h"

namespace vtensor {

namespace {

// Bounds of look-ahead: these bytes and pages of a row in any case, else one part in kShareAhead of
// the tensor's extent.
constexpr std::size_t kLeastAhead = 1 << 20;
constexpr std::size_t kLeastPagesAhead = 4;
constexpr std::size_t kShareAhead = 16;

}  // namespace

// Reports of faults in a tensor.
class RowFaults final : public faults::Range {
 public:
  explicit RowFaults(const RowShape& shape) : shape_(shape) {}

  // The owner's positions, as they are from now on; a buffer whose owner has left has none.
  void follow(Interval positions, bool owned) noexcept {
    begin_.store(positions.begin, std::memory_order_relaxed);
    end_.store(positions.end, std::memory_order_relaxed);
    owned_.store(owned, std::memory_order_relaxed);
  }

  void name(faults::Text& text, std::uintptr_t at) const noexcept override {
    const std::ptrdiff_t begin = load(begin_), position = position_of(at) - begin;
    if (position < 0) {
      text << "memory before the first position";
    } else {
      text << "position " << static_cast<std::size_t>(position);
    }
    if (shape_.rows > 1) text << " of row " << (at - base()) / row_bytes();
    text << " of the VTensor at ";
    text.address(base() + shape_.phase + static_cast<std::size_t>(begin) * shape_.item_bytes);
  }

  void explain(faults::Text& text, std::uintptr_t at) const noexcept override {
    const std::ptrdiff_t begin = load(begin_), end = load(end_), position = position_of(at);
    const auto length = static_cast<std::size_t>(end - begin);
    if (!owned_.load(std::memory_order_relaxed)) {
      text << "no page is mapped there, because the tensor is closed: keep an alias() of what is "
              "needed longer";
    } else if (position < begin) {
      text << "no page is mapped there, because positions at the front were given back: keep a "
              "view of what is needed longer";
    } else if (position >= static_cast<std::ptrdiff_t>(shape_.capacity)) {
      text << "no page is ever mapped there, because the tensor's capacity ends before: check what "
              "computed the address";
    } else if (position >= end) {
      text << "no page is mapped there, because the tensor has " << length
           << " positions: call extend() first";
    } else {
      text << "the tensor has " << length
           << " positions now, so a page is there: it came after the fault, or is shared with a "
              "fork and read-only; call unshare() before such a write";
    }
  }

 private:
  static std::ptrdiff_t load(const std::atomic<std::size_t>& position) noexcept {
    return static_cast<std::ptrdiff_t>(position.load(std::memory_order_relaxed));
  }
  std::size_t row_bytes() const noexcept { return bytes() / shape_.rows; }
  // The position in its row that an address lies at; -1 before position 0. Positions are counted
  // from position 0, and named from the owner's first.
  std::ptrdiff_t position_of(std::uintptr_t at) const noexcept {
    const std::size_t in_row = (at - base()) % row_bytes();
    if (in_row < shape_.phase) return -1;
    return static_cast<std::ptrdiff_t>((in_row - shape_.phase) /
                                       std::max<std::size_t>(1, shape_.item_bytes));
  }

  const RowShape shape_;
  std::atomic<std::size_t> begin_{0}, end_{0};
  std::atomic<bool> owned_{true};
};

std::shared_ptr<Buffer> Buffer::create(const std::shared_ptr<PagePool>& pool, const RowShape& shape,
                                       const Caller& caller) {
  std::shared_ptr<Buffer> cached;
  {
    const PoolLock lock(pool);
    // Buffers alone are reusable.
    cached = std::static_pointer_cast<Buffer>(pool->find_cached(shape));
  }
  if (cached && cached->reuse_cached(caller)) return cached;
  return make(pool, shape, caller);
}

std::shared_ptr<Buffer> Buffer::make(const std::shared_ptr<PagePool>& pool, const RowShape& shape,
                                     const Caller& caller, std::unique_ptr<faults::Range> report,
                                     std::size_t backed_rows, std::size_t backed_pages) {
  const std::size_t page = pool->page_size();
  const auto bytes = checked_multiply(shape.capacity, shape.item_bytes);
  const auto too_large = [&] {
    return CapacityExceeded("[", caller.operation, "] capacity of ", shape.capacity,
                            " positions of ", shape.item_bytes, " bytes in ", shape.rows,
                            " rows passes the address space: lower the capacity");
  };
  if (!bytes || *bytes > kMostBytes) throw too_large();
  if (shape.rows > PageTable::kMostRows) {
    throw CapacityExceeded("[", caller.operation, "] ", shape.rows,
                           " rows were asked for, a page table has at most ", PageTable::kMostRows,
                           ": make several tensors");
  }
  const std::size_t row_pages = std::max<std::size_t>(1, ceil_div(shape.phase + *bytes, page));
  const auto pages = checked_multiply(row_pages, shape.rows);
  if (!pages || *pages > kMostBytes / page) throw too_large();

  std::shared_ptr<Buffer> buffer(new Buffer(pool, shape, row_pages), DeleteUnlessForked{});
  if (report == nullptr) {
    auto row_faults = std::make_unique<RowFaults>(shape);
    buffer->row_faults_ = row_faults.get();
    report = std::move(row_faults);
  }
  buffer->open(caller, std::move(report),
               {.first = backed_pages, .every = backed_rows * row_pages});
  const PoolLock lock(pool);
  ++pool->counted.tensors_fresh;
  return buffer;
}

std::shared_ptr<Buffer> Buffer::place(const std::shared_ptr<Buffer>& host, Address base,
                                      const RowShape& shape, const Caller& caller) {
  const std::shared_ptr<PagePool>& pool = host->pool_;
  const std::size_t row_pages =
      ceil_div(shape.phase + shape.capacity * shape.item_bytes, pool->page_size());
  std::shared_ptr<Buffer> buffer(new Buffer(pool, shape, row_pages), DeleteUnlessForked{});
  std::unique_ptr<Generation> pin(host->publish({}));
  PoolLock lock(pool);
  try {
    buffer->work_.note(caller);
    buffer->range_.begin(base, pool->add(buffer.get()));
  } catch (...) {
    pool->end_locked(pin.release());
    throw;
  }
  buffer->host_ = pin.release();
  buffer->range_.show_in(host->range_.shared());
  buffer->reserved_ = true;
  return buffer;
}

Buffer::Buffer(const std::shared_ptr<PagePool>& pool, const RowShape& shape, std::size_t row_pages)
    : Client(pool, shape, row_pages, "tensor",
             "grow before the capture, or extend(n) and truncate(length) once so that the pages "
             "are ready") {}

// -- lengths

void Buffer::set_positions(Interval positions) {
  positions_ = positions;
  if (row_faults_ != nullptr) row_faults_->follow(positions, owned_);
  if (range_.shared() && !placed()) {
    const SharedRange& shown = *range_.shared();
    show(intersection({shown.word(0), shown.word(1)}, positions));
  }
}

void Buffer::assign(Interval positions, Interval extent) {
  set_positions(positions);
  set_extent(extent);
}

Interval Buffer::extent_of(Interval positions) const {
  const Interval needed = indices_of(positions);
  return needed.empty() ? needed : Interval{needed.begin, std::max(needed.end, extent_.end)};
}

void Buffer::set_extent(Interval extent) {
  if (extent == extent_) return;
  const Interval was = std::exchange(extent_, extent);
  for (const Interval lost : difference(was, extent)) release(lost);
  for (const Interval gained : difference(extent, was)) range_.set_why(gained, Why::needed);
  set_ready(ready_end_);
}

void Buffer::set_ready(std::size_t end) {
  ready_end_ = std::max(extent_.end, end);
  ready_until_ = whole_below(ready_end_);
}

std::size_t Buffer::ready_in(Interval indices) const {
  return range_.first_not(indices, [this](Entry entry) VT_LOCKED {
    return is_writable(entry) && range_.clean(*entry.page());
  });
}

void Buffer::ahead_changed() {
  if (!owned_) return;
  const std::size_t end = range_.first_not_whole({extent_.end, range_.reserved()}, Why::prefetched);
  // What was ready and has not gone is ready still.
  set_ready(ready_in({std::min(ready_end_, end), end}));
}

bool Buffer::is_ready(Interval positions, std::size_t written) const {
  const std::size_t end = indices_of(positions).end;
  if (end > ready_end_) return false;
  if (end > extent_.end && (zeroing_ || !ready_after_.empty())) return false;
  if (!shares()) return true;
  const Interval own = indices_of({std::min(written, positions_.end), positions.end});
  return range_.first_not(own, is_writable) >= own.end;
}

void Buffer::grow_ready(const Caller& caller, Interval positions) {
  work_.note(caller.stream);
  grow_to(positions, extent_of(positions), true);
}

bool Buffer::grow_within(const Caller& caller, Interval positions) {
  const PoolLock lock(pool_, std::try_to_lock);
  if (!lock || !is_ready(positions, positions_.end)) return false;
  grow_ready(caller, positions);
  return true;
}

void Buffer::grow_to(Interval positions, Interval extent, bool ready) {
  const Interval added = extent_.empty() ? extent : Interval{extent_.end, extent.end};
  const std::size_t n = positions.size() - positions_.size();
  if (!added.empty()) {
    ++(ready ? pool_->counted.growths_ready : pool_->counted.growths_mapped);
    if (ready) range_.event(trace::What::revive, added);
  }
  assign(positions, extent);
  look_ahead(n, !added.empty());
}

void Buffer::look_ahead(std::size_t added, bool crossed) {
  if (placed() || added == 0) return;  // a placed one's host says how far
  pace_.step(added);
  if (!pool_->looks_ahead()) return;
  const std::size_t position = positions_.end;
  if (crossed) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    pace_.mark(position, static_cast<std::uint64_t>(now.count()));
  }
  if (position + pace_.least() <= ready_until_) return;
  const std::size_t end = lead();
  // Where the bounds allow less than the pace asks for: ask again once half of it is used up.
  const bool enough = position + (end - position) / 2 <= ready_until_;
  if (enough || pool_->store().unused() == 0) return;
  want_until(end, true);
}

// Bounded by the capacity and by a share of the extent, so that a pool's look-ahead is a share of
// what its tensors store.
std::size_t Buffer::lead() const {
  const std::size_t position = positions_.end;
  const std::size_t index_bytes = range_.rows() * range_.page_size();
  const std::size_t least = std::max(kLeastAhead / index_bytes, kLeastPagesAhead);
  const std::size_t indices = std::min(pool_->options().prefetch / index_bytes,
                                       std::max(least, extent_.size() / kShareAhead));
  const std::size_t wanted = position + pace_.lead();
  const std::size_t allowed = whole_below(extent_.end + indices);
  return std::max(position, std::min({wanted, shape_.capacity, allowed}));
}

void Buffer::shrink_to(Interval positions, std::size_t keep) noexcept {
  const PoolLock lock(pool_);
  const std::size_t was_ready = ready_end_;
  assign(positions, indices_of(positions));
  // Truncated pages that the look-ahead would want again stay ready.
  std::size_t kept_end = extent_.end;
  if (extent_.empty()) {
    // Nothing stays.
  } else if (placed()) {
    kept_end = indices_of({0, std::clamp(keep, positions.end, shape_.capacity)}).end;
  } else if (pool_->looks_ahead()) {
    kept_end = indices_of({positions.begin, lead()}).end;
  }
  release(Why::prefetched, kept_end);
  set_ready(ready_in({extent_.end, std::min(was_ready, kept_end)}));
  range_.set_why({extent_.end, ready_end_}, Why::prefetched);
  give_back_unused();
}

void Buffer::leave() noexcept {
  if (range_.shared() && !placed()) {
    range_.shared()->close();
    may_keep_ = false;  // readers would see the next owner's bytes
  }
  owned_ = false;
  deferred_.reset();
  pool_->want_no_more(*this);
  pool_->unclean().remove(hooks.unclean);
  release({0, range_.reserved()});
  assign({}, {});
  set_ready(0);
}

std::vector<Reservation::Bytes> Buffer::bytes_of(Interval positions) const {
  std::vector<Reservation::Bytes> bytes;
  for (std::size_t row = 0; !positions.empty() && row < range_.rows(); ++row)
    bytes.push_back({address_of(row, positions.begin), positions.size() * shape_.item_bytes});
  return bytes;
}

// -- publication

Generation* Buffer::publish(Interval indices) {
  const PoolLock lock(pool_);
  return publish_locked(indices);
}

Generation* Buffer::try_publish(Interval indices) {
  const PoolLock lock(pool_, std::try_to_lock);
  return lock ? publish_locked(indices) : nullptr;
}

bool Buffer::published() {
  PoolLock lock(pool_);
  return !generations_.empty();
}

std::vector<FencePtr> Buffer::work() {
  const PoolLock lock(pool_);
  return fences();
}

Generation* Buffer::lease(const Caller& caller) {
  pool_->store().raise_if_broken();
  const PoolLock lock(pool_);
  raise_if_asleep(caller.operation);
  Generation* generation = publish_locked(extent_);
  try {
    if (driver_.traits().asynchronous) work_.begin_lease(caller);
  } catch (...) {
    pool_->end_locked(generation);
    throw;
  }
  generation->is_lease = true;
  return generation;
}

void Buffer::end_lease(const Caller& caller, FencePtr after) {
  if (!driver_.traits().asynchronous) return;
  const PoolLock lock(pool_);
  work_.end_lease(caller, std::move(after));
}

// -- shared pages

bool Buffer::copy_on_write() {
  PoolLock lock(pool_);
  return shares();
}

const Page* Buffer::shared_at(std::size_t row, std::size_t index) const {
  if (deferred_ != nullptr && deferred_->indices().contains(index))
    return deferred_->row(row)[index - deferred_->indices().begin];
  const bool shared = index < range_.reserved() && is_copy_on_write(range_.at(row, index));
  return shared ? range_.at(row, index).page() : nullptr;
}

std::size_t Buffer::shared_with(const Buffer& other) const {
  if (extent_.begin != other.extent_.begin) return 0;
  Interval same{extent_.begin, std::min(extent_.end, other.extent_.end)};
  for (std::size_t row = 0; row < range_.rows(); ++row) {
    std::size_t index = same.begin;
    while (index < same.end && range_.at(row, index).page() == other.range_.at(row, index).page())
      ++index;
    same.end = index;
  }
  // What the kernel has copied at a write is shared no longer.
  for (const Buffer* const buffer : {this, &other}) {
    for (const Reservation::Run& copied : private_copies_in(buffer->range_, same))
      same.end = std::min(same.end, copied.indices.begin);
  }
  return same.size();
}

std::size_t Buffer::writable_until(std::size_t position) const {
  std::size_t index = indices_of({position, position + 1}).begin;
  index =
      shares() ? range_.first_not({index, extent_.end}, is_writable) : std::max(index, extent_.end);
  return whole_below(index);
}

// -- readers in other processes

void Buffer::show_positions() {
  if (range_.shared()) show(positions_);
}

void Buffer::show(Interval positions) noexcept {
  const std::array words{static_cast<std::int64_t>(positions.begin),
                         static_cast<std::int64_t>(positions.end)};
  range_.shared()->set_words(0, words);
}

// -- look-ahead

void Buffer::prepare(std::size_t end) {
  PoolLock lock(pool_);
  trace::event(trace::What::prepare, range_.address(0, extent_.end),
               (end - positions_.end) * shape_.item_bytes * range_.rows(), range_.base());
  want_until(end, true);
}

void Buffer::announce(std::size_t end) {
  want_until(end, true);
  if (hooks.wanting.linked()) pool_->want_first(shared_from_this());
}

void Buffer::want_until(std::size_t end, bool soon) {
  const std::size_t index_end = indices_of({positions_.begin, end}).end;
  try {
    // What is mapped already may be what the last owner left.
    if (soon && to_clean()) pool_->clean_later(shared_from_this());
    if (index_end <= ready_end_ || range_.leaving() != 0) return;
    range_.reserve({0, index_end});
    pool_->want(shared_from_this());
    // Shared pages that wait to be unmapped go: growth would have to copy them.
    const Interval ahead{std::max(owned_until(), ready_end_), index_end};
    const std::size_t unshared =
        shares() ? range_.first_not(ahead, [](Entry e) { return !is_copy_on_write(e); })
                 : ahead.end;
    range_.set_why({ahead.begin, unshared}, Why::prefetched);
    if (soon) pool_->wake_mapper();
  } catch (const std::bad_alloc&) {
    // Growth that needs the pages raises it.
  }
}

void Buffer::find_missing(Reservation::Arrival& arrival, std::size_t pages) {
  if (deferred_ == nullptr) return Client::find_missing(arrival, pages);
  // All deferred pages at once: the owner has a whole prefix, or none of it.
  arrival = range_.shared(deferred_->indices(), deferred_->all());
}

void Buffer::arrived(const Reservation::Arrival& arrival) {
  if (deferred_ != nullptr && !arrival.given.empty() && !arrival.error) enter_deferred();
}

// -- giving back

std::size_t Buffer::pages_coming(Interval within) const {
  if (refusal()) return 0;
  std::size_t pages = 0;
  for (const Why why : {Why::unneeded, Why::fenced}) {
    for (const Interval indices : range_.runs_of(why))
      pages += range_.count_sole(intersection(indices, within));
  }
  return pages;
}

void Buffer::give_back_unused() noexcept {
  if (busy_) return;  // called again when the change under way ends
  const bool ends = !owned_ && generations_.empty() && asleep.load() == 0;
  if (ends && std::exchange(may_keep_, false)) try_to_cache();
  Client::give_back_unused();
}

// -- reuse

// Caches the first run of pages that the next owner can use: writable, and not shared. It begins at
// page 0, where another tensor begins, but in a placed buffer, whose next owner has its positions.
void Buffer::try_to_cache() {
  if (shape_.phase != 0 || !reserved_ || pool_->retired()) return;
  const auto usable = [](Entry entry) {
    return is_writable(entry) && entry.page()->references == 1;
  };
  const std::size_t end = range_.reserved();
  Interval pages{0, range_.first_not({0, end}, usable)};
  while (placed() && pages.empty() && pages.end < end) {
    pages.begin = pages.end + 1;
    pages.end = range_.first_not({pages.begin, end}, usable);
  }
  if (pages.empty() || (!placed() && !pool_->may_cache(pages.size() * range_.rows()))) return;
  range_.set_why(pages, Why::cached);
  try {
    ready_after_ = fences();
    pool_->cache(shared_from_this(), !placed());
  } catch (...) {
    return release(Why::cached);
  }
  range_.set_owner(pool_->next_id());
  const bool dirty = pool_->zero_policy() != ZeroPolicy::never;
  for (std::size_t row = 0; row < range_.rows(); ++row)
    range_.each_page({row, pages}, [dirty](Page* page) { page->dirty = dirty; });
  range_.event(trace::What::cache, pages);
  if (dirty) pool_->clean_later(shared_from_this());
}

void Buffer::evict() {
  pool_->uncache(*this);
  release(Why::cached);
  if (busy_ || !pool_->looks_ahead()) return give_back_unused();
  pool_->unmap_later(shared_from_this());  // its fences cost driver calls
}

void Buffer::keep_nothing() {
  may_keep_ = false;
  if (!cached().empty()) evict();
}

bool Buffer::reuse_cached(const Caller& caller) {
  PoolLock lock(pool_);
  if (cached().empty()) return false;
  const Busy busy(*this, lock, caller);  // the mapper may be zeroing a part of it
  if (!reusable()) return false;
  is_quiet();
  owner_end_ = std::make_unique<Generation>();
  // ready_after_ has the last owner's fences.
  work_.clear();
  work_.note(caller);
  owned_ = may_keep_ = true;  // from here on nothing can fail
  set_positions({});
  pace_ = {};
  take_error();
  range_.event(trace::What::reuse, cached());
  pool_->uncache(*this);
  range_.set_why(cached(), Why::prefetched);
  ahead_changed();
  if (!ready_after_.empty()) pool_->unmap_later(shared_from_this());
  ++pool_->counted.tensors_reused;
  return true;
}

// -- reports

void Buffer::check(std::unordered_map<const Page*, PageUse>& uses) const {
  std::size_t index = range_.first_not_whole(extent_, Why::needed);
  if (index == extent_.end) index = range_.first_not_whole({index, ready_end_}, Why::prefetched);
  if (index < ready_end_) {
    throw Error("I3: index ", index,
                " is in an extent, or ready, and is not mapped in every row, or may go");
  }
  if (range_.mapped(Why::needed) != extent_.size() * range_.rows() && !busy_)
    throw Error("I4: pages count as active that no extent has");
  Client::check(uses);
}

}  // namespace vtensor
