// A lease keeps the present extents of tensors mapped for launched work.
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/counted.h"
#include "base/process.h"
#include "base/trace.h"
#include "bind/arguments.h"
#include "bind/bindings.h"
#include "bind/operation.h"
#include "bind/released_gil.h"
#include "bind/tensor_core.h"

namespace vtensor::bind {

namespace {

// Runs on a thread of CUDA's own, and must make no driver call.
void end_with_graph(void* held) {
  auto* generation = static_cast<Generation*>(held);
  generation->client->pool()->end_later(generation);
}

// The state of a stream in the last pool queried: most leases are of one pool.
struct Launched {
  const PagePool* pool = nullptr;
  Stream stream = 0;
  bool captured = false;
  FencePtr after = nullptr;
};

Launched look_at(PagePool& pool, const Caller& caller) {
  Launched launched{&pool, caller.stream};
  if (!pool.traits().asynchronous) return launched;
  launched.captured = pool.driver().capturing(caller.operation, caller.stream);
  if (caller.named && !launched.captured) launched.after = pool.driver().fence(caller.stream);
  return launched;
}

// Leases are of tensors.
std::shared_ptr<Buffer> buffer_of(const Generation* generation) {
  return std::static_pointer_cast<Buffer>(generation->client);
}

void end_one(Generation* generation, const Caller& caller, Launched& launched) {
  const std::shared_ptr<Buffer> buffer = buffer_of(generation);
  PagePool& pool = *buffer->pool();
  trace::event(trace::What::lease, buffer->range().address(0, generation->indices.begin),
               generation->indices.size() * buffer->shape().rows * pool.page_size());
  if (launched.pool != &pool || launched.stream != caller.stream) launched = look_at(pool, caller);
  if (launched.captured) {
    pool.ensure_mapper();
    const auto mark = [&](bool is_lease) {
      const PoolLock lock(buffer->pool());
      generation->is_lease = is_lease;
    };
    mark(false);
    try {
      if (!caller.named) buffer->use(caller);
      pool.driver().keep_for_graph(caller.stream, end_with_graph, generation);
    } catch (...) {
      mark(true);  // no graph has it
      throw;
    }
    // After the step that can fail: a second try of a failed end must not remove the record of
    // another lease of the stream.
    if (caller.named) buffer->end_lease(caller, nullptr);
  } else {
    buffer->end_lease(caller, launched.after);
    pool.end(generation);
  }
}

// The cores of `tensors`, which must be VTensors. The result keeps them alive.
std::vector<nb::object> cores_of(const char* operation, nb::handle tensors) {
  return each(operation, "tensors", tensors, [operation](nb::handle tensor) {
    nb::object core = nb::getattr(tensor, "_core", nb::none());
    if (!nb::isinstance<TensorCore>(core))
      refuse(operation, "got ", type_text(tensor),
             ": give VTensors; of a Reader, call record_stream(stream)");
    return core;
  });
}

// begin() and end() are one call from Python each, so no exception from outside leaves a lease half
// open (I17). It pins each tensor's extent as a view would. A lease without an end pins its extents
// for good: its work may still be running.
class Lease {
 public:
  // For work that will be launched in `stream`; by default, torch's current stream at the end.
  // `tensors` is an iterable of VTensors.
  Lease(nb::handle tensors, std::optional<Stream> stream)
      : cores_(cores_of("lease", tensors)), stream_(stream) {}
  Lease& operator=(Lease&&) = delete;

  // Throws Closed, and Error if it has begun.
  void begin() {
    refuse_in_forked_child("lease");
    if (begun_ || changing_ != 0)
      throw Error("[lease] this lease has begun and not ended: make one for each with");
    const Counted changes(changing_);
    begun_ = true;
    std::vector<Generation*> held;
    held.reserve(cores_.size());
    try {
      Caller caller{"lease"};
      for (const nb::object& core : cores_) {
        TensorCore& tensor = nb::cast<TensorCore&>(core);
        if (!tensor.closed()) {  // torch and the driver are asked about the stream once a pool
          const std::shared_ptr<PagePool>& pool = tensor.buffer()->pool();
          if (held.empty() || held.back()->client->pool() != pool)
            caller = caller_of("lease", stream_, *pool);
        }
        // An operation on each: nothing moves its pages meanwhile.
        held.push_back(tensor.lease(caller));
      }
    } catch (...) {
      begun_ = false;
      const ReleasedGil released;
      for (Generation* generation : held) {
        if (stream_) buffer_of(generation)->end_lease({"lease", *stream_, true}, nullptr);
        generation->client->pool()->end(generation);
      }
      throw;
    }
    generations_ = std::move(held);
  }

  // Called after all of the work is launched. If the work is captured into a graph, the graph pins
  // the extents for its life. If the driver refuses that, they stay pinned, and the error is
  // thrown. Does nothing if the lease has not begun. Throws Error if another thread begins or ends
  // it.
  void end() {
    if (!begun_) return;
    refuse_in_forked_child("lease");
    if (changing_ != 0)
      throw Error("[lease] another thread begins or ends this lease: make one for each with");
    const Counted changes(changing_);
    std::vector<Caller> callers;
    for (const Generation* generation : generations_) {  // `look_at` asks about a named stream
      callers.push_back(stream_ ? Caller{"lease", *stream_, true}
                                : caller_of("lease", {}, *generation->client->pool()));
    }
    std::vector<Generation*> left;
    left.reserve(generations_.size());
    const std::vector<Generation*> held = std::exchange(generations_, {});
    std::exception_ptr error;
    {
      const ReleasedGil released;
      Launched launched;
      for (std::size_t i = 0; i < held.size(); ++i) {
        try {
          end_one(held[i], callers[i], launched);
        } catch (...) {
          error = std::current_exception();
          left.push_back(held[i]);
        }
      }
    }
    generations_ = std::move(left);
    begun_ = !generations_.empty();
    if (error) std::rethrow_exception(error);
  }

 private:
  std::vector<nb::object> cores_;
  std::optional<Stream> stream_;
  std::vector<Generation*> generations_;
  bool begun_ = false;
  std::size_t changing_ = 0;  // calls of begin() and end(), which release the GIL
};

}  // namespace

void bind_lease(nb::module_& module) {
  nb::class_<Lease>(module, "Lease")
      .def(nb::init<nb::handle, std::optional<Stream>>(), "tensors"_a, "stream"_a = nb::none())
      .def(
          "__enter__",
          [](Lease& lease) {
            lease.begin();
            return &lease;
          },
          nb::rv_policy::reference)
      .def(
          "__exit__", [](Lease& lease, nb::args) { lease.end(); },
          nb::sig("def __exit__(self, *exc: object) -> None"));
}

}  // namespace vtensor::bind
