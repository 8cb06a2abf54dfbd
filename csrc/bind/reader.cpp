// What a process reads of another's shared ranges.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/process.h"
#include "bind/bindings.h"
#include "bind/operation.h"
#include "bind/torch_bridge.h"
#include "policy/page_record.h"
#include "vmm/range_reader.h"

namespace vtensor::bind {

namespace {

// A forked child leaves the readers of its parent as they are.
struct DeleteOwn {
  void operator()(RangeReader* range) const {
    if (!range->left_behind()) delete range;
  }
};

// The ranges of one object, which are synced together. Views keep their range.
class ReaderCore {
 public:
  // `words`: how many the object's owner keeps, in the first range.
  ReaderCore(const std::vector<std::pair<int, int>>& files, std::size_t words) {
    std::vector<std::pair<Descriptor, Descriptor>> received;  // closed if one of them is refused
    received.reserve(files.size());
    for (const auto& [range, memory] : files) received.emplace_back(range, memory);
    for (auto& [range, memory] : received) {
      ranges_.emplace_back(new RangeReader(range.take(), memory.take(), words), DeleteOwn{});
      pointers_.push_back(ranges_.back().get());
      words = 0;
    }
  }

  bool sync() {
    const Operation operation(*this);
    require_open();
    // Of anything new it may have to wait for the writer.
    return RangeReader::stale(pointers_) ? without_gil([&] { return RangeReader::sync(pointers_); })
                                         : RangeReader::sync(pointers_);
  }
  nb::object storage(std::size_t i) {
    const std::shared_ptr<RangeReader>& range = at(i);
    return TorchBridge::get().storage_over(range, range->base(), range->bytes());
  }
  void close() {
    const Operation operation(*this);
    pointers_.clear();
    ranges_.clear();
  }
  bool closed() const { return ranges_.empty(); }
  std::size_t ranges() const { return ranges_.size(); }
  std::vector<std::uint64_t> words() {
    const Operation operation(*this);
    const std::span<const std::uint64_t> words = at(0)->words();
    return {words.begin(), words.end()};
  }
  std::size_t mapped(std::size_t i) {
    const Operation operation(*this);
    return at(i)->mapped();
  }
  std::vector<PageRecord> pages(std::size_t i, std::size_t rows) {
    const Operation operation(*this);
    const RangeReader& range = *at(i);
    const std::size_t row_pages = range.bytes() / range.page_size() / rows;
    std::vector<PageRecord> records;
    for (std::size_t n = 0; n < range.bytes() / range.page_size(); ++n) {
      if (range.handle_at(n) < 0) continue;
      records.push_back({n / row_pages, n % row_pages, range.base() + n * range.page_size(),
                         range.handle_at(n), 1, "mapped"});
    }
    return records;
  }
  const std::shared_ptr<RangeReader>& at(std::size_t i) const {
    require_open();
    return ranges_.at(i);
  }

 private:
  // One at a time. Refused for what a forked child has of its parent.
  class Operation {
   public:
    explicit Operation(ReaderCore& core) : core_(core) {
      if (!core.ranges_.empty() && core.ranges_.front()->left_behind())
        refuse_in_forked_child("reader");
      core.mutex_.lock("reader");
    }
    ~Operation() { core_.mutex_.unlock(); }
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

   private:
    ReaderCore& core_;
  };

  void require_open() const {
    if (closed()) throw Closed("[reader] the reader is closed: receive the object again");
  }

  std::vector<std::shared_ptr<RangeReader>> ranges_;
  std::vector<RangeReader*> pointers_;
  OperationMutex mutex_{"reader"};
};

}  // namespace

void bind_reader(nb::module_& module) {
  nb::class_<ReaderCore>(module, "ReaderCore")
      .def(nb::init<const std::vector<std::pair<int, int>>&, std::size_t>(), "files"_a, "words"_a)
      .def("sync", &ReaderCore::sync)
      .def("storage", &ReaderCore::storage, "range"_a)
      .def("close", &ReaderCore::close)
      .def_prop_ro("closed", &ReaderCore::closed)
      .def_prop_ro("ranges", &ReaderCore::ranges)
      .def_prop_ro("words", &ReaderCore::words)
      .def(
          "page_size", [](ReaderCore& core, std::size_t i) { return core.at(i)->page_size(); },
          "range"_a)
      .def(
          "bytes", [](ReaderCore& core, std::size_t i) { return core.at(i)->bytes(); }, "range"_a)
      .def("mapped", &ReaderCore::mapped, "range"_a)
      .def("pages", &ReaderCore::pages, "range"_a, "rows"_a)
      .def("fail_after", [](ReaderCore& core, std::uint64_t skip, std::uint64_t refuse) {
        core.at(0)->meter().fail_after(skip, refuse);
      });
}

}  // namespace vtensor::bind
