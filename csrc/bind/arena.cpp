// The half of an Arena that Python does not see.
#include "arena/arena.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/process.h"
#include "bind/arguments.h"
#include "bind/bindings.h"
#include "bind/operation.h"
#include "bind/operation_lock.h"
#include "bind/released_gil.h"
#include "bind/torch_bridge.h"

namespace vtensor::bind {

namespace nb = nanobind;

namespace {

class ArenaCore {
 public:
  ArenaCore(const std::shared_ptr<PagePool>& pool, std::size_t bytes, bool zeros) : pool_(pool) {
    refuse_in_forked_child("Arena");
    const Caller asking = caller_of("Arena", {}, *pool);
    with_memory(*pool, asking, [&] { arena_ = Arena::make(pool, bytes, zeros, asking); });
    bytes_ = bytes;
  }
  ~ArenaCore() {
    if (arena_) arena_->abandon();
  }
  ArenaCore(const ArenaCore&) = delete;
  ArenaCore& operator=(const ArenaCore&) = delete;

  std::vector<bool> map(nb::handle intervals) {
    constexpr const char* name = "Arena.map";
    const std::vector<Interval> all = read(name, intervals);
    const Operation operation(*this, name);
    const Caller asking = caller_of(name, {}, *pool_);
    std::vector<char> kept;
    arena_->raise_error();
    with_memory(*pool_, asking, [&] { kept = arena_->map(asking, all); });
    return {kept.begin(), kept.end()};
  }

  void unmap(nb::handle intervals, std::optional<Stream> stream) {
    constexpr const char* name = "Arena.unmap";
    const std::vector<Interval> all = read(name, intervals);
    const Operation operation(*this, name);
    const Caller asking = caller_of(name, stream, *pool_);
    const ReleasedGil released;
    arena_->unmap(asking, all);
  }

  void prepare(nb::handle intervals) {
    constexpr const char* name = "Arena.prepare";
    const std::vector<Interval> all = read(name, intervals);
    const Operation operation(*this, name);
    arena_->raise_error();
    const ReleasedGil released;
    arena_->prepare(all);
  }

  std::size_t trim(nb::handle intervals) {
    constexpr const char* name = "Arena.trim";
    const std::vector<Interval> all =
        intervals.is_none() ? std::vector<Interval>{{0, bytes_}} : read(name, intervals);
    const Operation operation(*this, name);
    const Caller asking = caller_of(name, {}, *pool_);
    const ReleasedGil released;
    return arena_->trim(asking, all);
  }

  std::vector<bool> holds(nb::handle intervals) {
    constexpr const char* name = "Arena.holds";
    const std::vector<Interval> all = read(name, intervals);
    const Operation operation(*this, name);
    const ReleasedGil released;
    const std::vector<char> held = arena_->holds(all);
    return {held.begin(), held.end()};
  }

  void record_stream(std::optional<Stream> stream) {
    constexpr const char* name = "Arena.record_stream";
    const Operation operation(*this, name);
    // Not as a named one, which may end: it is asked again when pages go.
    arena_->use({name, caller_of(name, stream, *pool_).stream});
  }

  // The whole range, as bytes; it keeps the addresses reserved, and no page.
  nb::object storage() {
    const Operation operation(*this, "Arena");
    Generation* generation;
    {
      const ReleasedGil released;
      generation = arena_->publish();
    }
    return TorchBridge::get().storage_over(generation, arena_->base(), arena_->bytes(),
                                           pool_->traits().device);
  }

  ArenaCounts counts() {
    const Operation operation(*this, "Arena.stats");
    const ReleasedGil released;
    return arena_->counts();
  }

  std::vector<PageRecord> pages() {
    const Operation operation(*this, "Arena.pages");
    const ReleasedGil released;
    return arena_->pages();
  }

  void close(std::optional<Stream> stream) {
    refuse_in_forked_child("Arena.close");
    mutex_.lock("Arena.close");
    const std::unique_ptr<OperationMutex, void (*)(OperationMutex*)> unlock(
        &mutex_, [](OperationMutex* mutex) { mutex->unlock(); });
    if (!arena_) return;
    const Caller asking = caller_of("Arena.close", stream, *pool_);
    const ReleasedGil released;
    arena_->use(asking);
    closed_ = true;
    std::exchange(arena_, nullptr)->abandon();
    pool_.reset();
  }
  bool closed() const { return closed_; }

 private:
  // One operation: refused in a forked child, on a closed arena and beside another operation.
  class Operation {
   public:
    Operation(ArenaCore& core, const char* name) : core_(core) {
      refuse_in_forked_child(name);
      core.mutex_.lock(name);
      if (core.arena_) return;
      core.mutex_.unlock();
      throw Closed("[" + std::string(name) + "] the arena is closed: make a new one");
    }
    ~Operation() { core_.mutex_.unlock(); }

   private:
    ArenaCore& core_;
  };

  // Pairs of bytes, from and up to.
  std::vector<Interval> read(const char* operation, nb::handle intervals) const {
    const auto bytes = static_cast<std::int64_t>(bytes_);
    return each(operation, "intervals", intervals, [&](nb::handle interval) {
      if (PySequence_Check(interval.ptr()) == 0) {
        refuse(operation, "an interval is " + type_text(interval) +
                              ": give pairs of bytes, such as [(0, 4096)]");
      }
      const std::vector<std::int64_t> ends = integers(operation, "an interval", interval);
      if (ends.size() != 2)
        refuse(operation, "an interval has " + std::to_string(ends.size()) +
                              " ends: give (first byte, byte after the last)");
      if (ends[0] < 0 || ends[0] > ends[1] || ends[1] > bytes) {
        refuse(operation, "bytes " + std::to_string(ends[0]) + " to " + std::to_string(ends[1]) +
                              " are not in the arena, which has " + std::to_string(bytes));
      }
      return Interval{static_cast<std::size_t>(ends[0]), static_cast<std::size_t>(ends[1])};
    });
  }

  std::shared_ptr<PagePool> pool_;  // both null once closed
  std::shared_ptr<Arena> arena_;
  std::size_t bytes_ = 0;
  std::atomic<bool> closed_{false};
  OperationMutex mutex_;
};

}  // namespace

void bind_arena(nb::module_& module) {
  nb::class_<ArenaCounts>(module, "ArenaCounts")
      .def_ro("active", &ArenaCounts::active)
      .def_ro("cached", &ArenaCounts::cached)
      .def_ro("prefetched", &ArenaCounts::prefetched)
      .def_ro("pinned", &ArenaCounts::pinned)
      .def_ro("quarantined", &ArenaCounts::quarantined)
      .def_ro("evicted", &ArenaCounts::evicted);

  const auto no_stream = nb::arg("stream") = nb::none();
  nb::class_<ArenaCore>(module, "ArenaCore")
      .def(nb::init<const std::shared_ptr<PagePool>&, std::size_t, bool>(), nb::arg("pool"),
           nb::arg("nbytes"), nb::arg("zeros"))
      .def("map", &ArenaCore::map, nb::arg("intervals"))
      .def("unmap", &ArenaCore::unmap, nb::arg("intervals"), no_stream)
      .def("prepare", &ArenaCore::prepare, nb::arg("intervals"))
      .def("trim", &ArenaCore::trim, nb::arg("intervals") = nb::none())
      .def("holds", &ArenaCore::holds, nb::arg("intervals"))
      .def("record_stream", &ArenaCore::record_stream, no_stream)
      .def("storage", &ArenaCore::storage)
      .def("counts", &ArenaCore::counts)
      .def("pages", &ArenaCore::pages)
      .def("close", &ArenaCore::close, no_stream)
      .def_prop_ro("closed", &ArenaCore::closed);
}

}  // namespace vtensor::bind
