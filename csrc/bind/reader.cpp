// What a process reads of another's shared ranges.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/process.h"
#include "bind/bindings.h"
#include "bind/operation.h"
#include "bind/sharing.h"
#include "bind/torch_bridge.h"
#include "policy/client.h"
#include "vmm/range_reader.h"

namespace vtensor::bind {

namespace {

// The ranges of one object, which are synced together. Views keep all of them.
class ReaderCore {
 public:
  // `words`: how many the object's owner keeps, in the first range. The descriptors are closed in
  // any case. `cuda_library`: unless empty, a simulated libcuda, whose memory is the host's.
  ReaderCore(ReaderFiles& files, std::size_t words, const std::string& cuda_library) {
    std::vector<Descriptor> ranges = files.release();
    if (ranges.empty()) throw InvalidArgument("[reader] there are no files to read");
    Descriptor memory = std::move(ranges.front());
    ranges.erase(ranges.begin());
    CudaOptions cuda;
    if (!cuda_library.empty()) {
      cuda.library = cuda_library;
      cuda.memory_is_host_memory = true;
    }
    readers_ = without_gil([&] {
      // A forked child leaves the readers of its parent as they are.
      return std::shared_ptr<RangeReaders>(new RangeReaders(ranges, std::move(memory), words, cuda),
                                           [](RangeReaders* readers) {
                                             if (!readers->left_behind()) delete readers;
                                           });
    });
  }

  bool sync() {
    const auto lock = begin();
    RangeReaders& readers = open();
    const Caller caller{"reader", TorchBridge::get().current_stream(device())};
    const bool stale = readers.stale();
    // If there is anything new, it may have to wait for the writer.
    return stale ? without_gil([&] { return readers.sync(caller, true); })
                 : readers.sync(caller, false);
  }
  void record_stream(Stream stream) {
    const auto lock = begin();
    WriterMemory& memory = open().memory();
    static_cast<void>(memory.driver().capturing("reader", stream));
    memory.note({"reader", stream});  // as a stream of torch's: it is used again when pages go
  }
  // A storage over bytes that lie in the range.
  nb::object storage(std::size_t i, std::size_t offset, std::size_t bytes) {
    const Address at = open().at(i).base() + offset;
    return TorchBridge::get().storage_over(readers_, device(), at, bytes);
  }
  void close() {
    const auto lock = begin();
    // On a device the last one waits for what reads there.
    std::shared_ptr<RangeReaders> last = std::move(readers_);
    without_gil([&] { last.reset(); });
  }
  bool closed() const { return readers_ == nullptr; }
  // Whether a forked child has it of its parent.
  bool left_behind() const { return readers_ && readers_->left_behind(); }
  void require_open() const { open(); }
  std::size_t ranges() const { return closed() ? 0 : readers_->size(); }
  std::vector<std::uint64_t> words() {
    const auto lock = begin();
    const std::span<const std::uint64_t> words = open().at(0).words();
    return {words.begin(), words.end()};
  }
  std::size_t page_size() const { return open().memory().driver().traits().page_size; }
  std::size_t bytes(std::size_t i) const { return open().at(i).pages() * page_size(); }
  std::size_t mapped(std::size_t i) {
    const auto lock = begin();
    return open().at(i).mapped();
  }
  std::vector<PageRecord> pages(std::size_t i, std::size_t rows) {
    const auto lock = begin();
    const RangeReader& range = open().at(i);
    const std::size_t row_pages = range.pages() / rows;
    std::vector<PageRecord> records;
    for (std::size_t n = 0; n < range.pages(); ++n) {
      if (range.handle_at(n) < 0) continue;
      records.push_back({n / row_pages, n % row_pages, range.base() + n * page_size(),
                         range.handle_at(n), 1, "mapped"});
    }
    return records;
  }
  CallMeter& meter() const { return open().memory().driver().meter(); }

 private:
  // One operation at a time.
  std::unique_lock<OperationMutex> begin() {
    if (!closed()) open();  // a thread of the parent may have had the mutex
    mutex_.lock("reader");
    return {mutex_, std::adopt_lock};
  }
  Device device() const { return open().memory().driver().traits().device; }
  RangeReaders& open() const {
    if (closed()) throw Closed("[reader] the reader is closed: receive the object again");
    if (left_behind()) refuse_in_forked_child("reader");
    return *readers_;
  }

  std::shared_ptr<RangeReaders> readers_;
  OperationMutex mutex_{"reader"};
};

}  // namespace

void bind_reader(nb::module_& module) {
  nb::class_<ReaderFiles>(module, "ReaderFiles", "Descriptors that are closed with it.")
      .def(nb::init<>())
      .def(
          "take",
          [](ReaderFiles& files, int descriptor) {
            // multiprocessing receives descriptors that programs would inherit.
            fcntl(descriptor, F_SETFD, FD_CLOEXEC);
            files.take(Descriptor(descriptor));
          },
          "descriptor"_a)
      .def_prop_ro("descriptors", &ReaderFiles::descriptors)
      .def("close", [](ReaderFiles& files) { files.release(); });
  nb::class_<ReaderCore>(module, "ReaderCore")
      .def(nb::init<ReaderFiles&, std::size_t, const std::string&>(), "files"_a, "words"_a,
           "cuda_library"_a)
      // Synced once. If that is refused nothing is left, however long the exception lives.
      .def_static(
          "received",
          [](ReaderFiles& files, std::size_t words, const std::string& cuda_library) {
            auto core = std::make_unique<ReaderCore>(files, words, cuda_library);
            core->sync();
            return core;
          },
          "files"_a, "words"_a, "cuda_library"_a)
      .def("sync", &ReaderCore::sync)
      .def("storage", &ReaderCore::storage, "range"_a, "offset"_a, "nbytes"_a)
      // Clears `shown`, which has its tensors, in the same call (I17).
      .def(
          "close",
          [](ReaderCore& core, nb::dict shown) {
            PyDict_Clear(shown.ptr());
            core.close();
          },
          "shown"_a = nb::dict())
      .def("require_open", &ReaderCore::require_open)
      .def_prop_ro("closed", &ReaderCore::closed)
      .def_prop_ro("left_behind", &ReaderCore::left_behind)
      .def_prop_ro("ranges", &ReaderCore::ranges)
      .def_prop_ro("words", &ReaderCore::words)
      .def_prop_ro("page_size", &ReaderCore::page_size)
      .def("bytes", &ReaderCore::bytes, "range"_a)
      .def("record_stream", &ReaderCore::record_stream, "stream"_a)
      .def("mapped", &ReaderCore::mapped, "range"_a)
      .def("pages", &ReaderCore::pages, "range"_a, "rows"_a)
      .def("fail_after", [](ReaderCore& core, std::uint64_t skip, std::uint64_t refuse) {
        core.meter().fail_after(skip, refuse);
      });
}

}  // namespace vtensor::bind
