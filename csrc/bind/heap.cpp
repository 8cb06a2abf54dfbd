// The C++ half of vtensor.memory, and the functions that torch's allocator calls.
#include "heap/heap.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/process.h"
#include "bind/arguments.h"
#include "bind/bindings.h"
#include "bind/operation.h"
#include "bind/released_gil.h"
#include "bind/sharing.h"
#include "bind/torch_bridge.h"
#include "policy/sleep.h"

namespace vtensor::bind {

namespace {

// The heap that serves torch's allocations in this thread.
thread_local std::shared_ptr<Heap> current_heap;
// The reason of the last refusal. torch says only that memory is out.
thread_local std::string last_refusal;

// The heap of each address that torch has. torch frees in any thread, and after the heap was
// closed. Never destroyed, because torch frees at the end of the process too.
auto& heaps = *new std::map<Address, std::shared_ptr<Heap>>;
std::mutex& heaps_mutex = *new std::mutex;

// The heap that served a thread's allocations before another does. Not bound as a shared_ptr, whose
// copies would need the GIL to end: torch frees without it.
struct OuterHeap {
  std::shared_ptr<Heap> heap;
};

class HeapCore {
 public:
  explicit HeapCore(const std::shared_ptr<PagePool>& pool) {
    refuse_in_forked_child("memory");
    heap_.reset(new Heap(pool), DeleteUnlessForked{});
  }

  Address allocate(std::size_t bytes, std::optional<Stream> stream) {
    const std::shared_ptr<Heap> heap = open("memory.allocate");
    const Caller caller = caller_of("memory.allocate", stream, *heap->pool());
    return with_memory(*heap->pool(), caller, [&] { return heap->allocate(caller, bytes); });
  }

  void free(Address address, std::optional<Stream> stream) {
    const std::shared_ptr<Heap> heap = open("memory.free");
    const Caller caller = caller_of("memory.free", stream, *heap->pool());
    if (without_gil([&] { return heap->free(caller, address); })) return;
    refuse(caller.operation, "nothing was allocated at address ", address);
  }

  // A storage that frees its bytes at its end.
  nb::object storage(std::size_t bytes) {
    const std::shared_ptr<Heap> heap = open("memory.storage");
    const Address address = allocate(bytes, {});
    Generation* generation;
    try {
      generation = without_gil([&] { return heap->publish(address); });
    } catch (...) {
      heap->free({"memory.storage"}, address);
      throw;
    }
    return TorchBridge::get().storage_over(generation, address, bytes);
  }

  std::size_t trim() {
    const std::shared_ptr<Heap> heap = open("memory.trim");
    const Caller caller = caller_of("memory.trim", {}, *heap->pool());
    return without_gil([&] { return heap->trim(caller); });
  }

  HeapCounts counts() {
    const std::shared_ptr<Heap> heap = open("memory.stats");
    return without_gil([&] { return heap->counts(); });
  }

  // First byte and bytes of each arena in which these addresses lie, and its files. None if they
  // lie in no arena of this heap.
  using OpenArenas = std::pair<std::vector<std::pair<Address, std::size_t>>, ReaderFiles>;
  std::optional<OpenArenas> open_for_readers(const std::vector<Address>& addresses) {
    const std::shared_ptr<Heap> heap = open("share");
    return without_gil([&]() -> std::optional<OpenArenas> {
      auto regions = heap->regions();
      std::erase_if(regions, [&](const auto& region) {
        return std::none_of(addresses.begin(), addresses.end(), [&](Address address) {
          return address - region->base() < region->bytes();
        });
      });
      if (regions.empty()) return std::nullopt;
      OpenArenas open;
      for (const auto& region : regions) {
        region->share("share", 0);
        open.first.emplace_back(region->base(), region->bytes());
      }
      open.second = reader_files("share", regions);
      return open;
    });
  }
  void fall_asleep(FallAsleep& sleep) {
    const std::shared_ptr<Heap> heap = open("Pool.sleep");
    for (const auto& region : without_gil([&] { return heap->regions(); })) sleep.add(region);
  }
  bool asleep() {
    const std::shared_ptr<Heap> heap = open("Pool.sleep");
    return without_gil([&] { return heap->asleep(); });
  }

  // Serves torch's allocations in this thread until `leave_heap` of the result.
  OuterHeap enter() { return {std::exchange(current_heap, open("memory"))}; }

  // Storages, and memory that torch has, live on until they are freed.
  void close() {
    std::shared_ptr<Heap> heap = std::move(heap_);
    if (!heap) return;
    const ReleasedGil released;
    heap->close();
    heap.reset();
  }

 private:
  // The result keeps the heap alive if another thread closes it during an operation.
  std::shared_ptr<Heap> open(const char* operation) const {
    refuse_in_forked_child(operation);
    if (!heap_) throw Closed("[", operation, "] the pool is closed: make a new one");
    return heap_;
  }

  std::shared_ptr<Heap> heap_;
};

}  // namespace

void bind_heap(nb::module_& module) {
  using Counts = HeapCounts;
  bind_fields(nb::class_<Counts>(module, "HeapCounts"), VT_FIELD(Counts, allocations),
              VT_FIELD(Counts, allocated), VT_FIELD(Counts, reserved), VT_FIELD(Counts, pages));

  const auto no_stream = "stream"_a = nb::none();
  nb::class_<HeapCore>(module, "HeapCore")
      .def(nb::init<const std::shared_ptr<PagePool>&>(), "pool"_a)
      .def("allocate", &HeapCore::allocate, "nbytes"_a, no_stream)
      .def("free", &HeapCore::free, "address"_a, no_stream)
      .def("storage", &HeapCore::storage, "nbytes"_a)
      .def("open_for_readers", &HeapCore::open_for_readers, "addresses"_a)
      .def("trim", &HeapCore::trim)
      .def("counts", &HeapCore::counts)
      .def_prop_ro("asleep", &HeapCore::asleep)
      .def("fall_asleep", &HeapCore::fall_asleep, "sleep"_a)
      .def("enter", &HeapCore::enter)
      .def("close", &HeapCore::close);
  nb::class_<OuterHeap>(module, "OuterHeap");
  module.def("leave_heap", [](OuterHeap& outer) { current_heap = std::move(outer.heap); });
  // Clears the reason, so that it does not explain a later refusal.
  module.def("take_heap_refusal", [] { return std::exchange(last_refusal, {}); });
}

// Functions in the form that torch.cuda.memory.CUDAPluggableAllocator requires. A null pointer is a
// refusal: torch then gives its cache back, asks again, and raises torch.OutOfMemoryError.

extern "C" [[gnu::visibility("default")]] void* vtensor_allocate(std::size_t bytes, int device,
                                                                 void* stream) noexcept {
  try {
    const std::shared_ptr<Heap> heap = current_heap;
    refuse_in_forked_child("memory");
    if (!heap)
      throw Error("[memory] torch asks for ", bytes,
                  " bytes in a thread that is not inside vtensor.memory(pool)");
    if (const Device own = heap->pool()->traits().device; own.index != device && !own.on_host())
      refuse("memory", "torch asks for memory of device ", device,
             ", and the pool has that of device ", own.index);
    const Caller caller{"memory", reinterpret_cast<Stream>(stream)};
    // torch holds the lock of its allocator, so its cache cannot be emptied. It does that itself
    // when an allocation is refused, and asks again.
    Address address = 0;
    vtensor::with_memory(
        *heap->pool(), caller, [&] { address = heap->allocate(caller, bytes); },
        [] { return false; });
    try {
      const std::lock_guard lock(heaps_mutex);
      heaps.emplace(address, heap);
    } catch (...) {
      heap->free(caller, address);
      throw;
    }
    return reinterpret_cast<void*>(address);
  } catch (const std::exception& error) {
    try {
      last_refusal = error.what();
    } catch (...) {
      last_refusal.clear();
    }
    return nullptr;
  }
}

extern "C" [[gnu::visibility("default")]] void vtensor_free(void* at, std::size_t, int,
                                                            void* stream) noexcept {
  if (in_forked_child()) return;
  // Taken before it is free: from then on another allocation may have the address.
  std::unique_lock lock(heaps_mutex);
  auto one = heaps.extract(reinterpret_cast<Address>(at));
  lock.unlock();
  if (one.empty()) return;
  try {
    one.mapped()->free({"memory", reinterpret_cast<Stream>(stream)}, one.key());
  } catch (...) {  // it stays allocated, and can be freed later
    lock.lock();
    heaps.insert(std::move(one));
  }
}

}  // namespace vtensor::bind
