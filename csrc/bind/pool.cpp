#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/errors.h"
#include "base/process.h"
#include "bind/arguments.h"
#include "bind/bindings.h"
#include "bind/operation.h"
#include "bind/released_gil.h"
#include "driver/driver.h"
#include "policy/page_pool.h"

namespace vtensor::bind {

namespace {

// The counts of calls by their names, without zeros.
template <typename Count>
nb::dict by_name(Count count) {
  nb::dict counts;
  for (std::size_t i = 0; i < kCallCount; ++i) {
    const auto call = static_cast<Call>(i);
    if (const std::uint64_t counted = count(call)) counts[nb::cast(name_of(call))] = counted;
  }
  return counts;
}

nb::dict driver_calls(PagePool& pool) {
  const auto of = [&](ThreadRole role) {
    return by_name([&](Call call) { return pool.driver().meter().count(role, call); });
  };
  nb::dict calls;
  calls["caller"] = of(ThreadRole::caller);
  calls["mapper"] = of(ThreadRole::mapper);
  return calls;
}

std::string_view name_of(ExportKind kind) {
  switch (kind) {
    case ExportKind::file:
      return "file";
    case ExportKind::descriptors:
      return "descriptors";
    case ExportKind::fabric:
      return "fabric";
    case ExportKind::none:
      break;
  }
  return "none";
}

// The sentence that says why it is; none if it is not.
std::optional<std::string> broken(PagePool& pool) {
  try {
    pool.store().raise_if_broken();
  } catch (const Error& error) {
    return error.what();
  }
  return std::nullopt;
}

std::pair<std::int32_t, std::int32_t> as_pair(const Device& device) {
  return {device.type, device.index};
}

// Runs `body` without the GIL. Raises in a forked child.
template <typename Body>
auto in_pool(const char* operation, const Body& body) {
  refuse_in_forked_child(operation);
  return without_gil(body);
}

// Binds a method of the pool that runs so.
template <typename Result, typename... Args>
auto pool_method(const char* operation, Result (PagePool::*method)(Args...)) {
  return [=](PagePool& pool, Args... args) {
    return in_pool(operation, [&] { return (pool.*method)(args...); });
  };
}

// A closed pool, which lives until the last view over its pages is gone.
struct WeakPool {
  explicit WeakPool(const std::shared_ptr<PagePool>& pool) : pool(pool), mapper(pool->mapper()) {}

  const std::weak_ptr<PagePool> pool;
  std::shared_ptr<Mapper> mapper;
};

std::shared_ptr<PagePool> host_pool(std::size_t page_size, const PoolOptions& options,
                                    bool shareable, bool strict_holes) {
  return in_pool("Pool", [&] {
    const HostOptions host{
        .page_size = page_size, .strict_holes = strict_holes, .shareable = shareable};
    return PagePool::create(make_host_driver(host), options);
  });
}

std::shared_ptr<PagePool> cuda_pool(int device, std::size_t page_size, const PoolOptions& options,
                                    bool shareable, bool rdma, const std::string& library,
                                    bool memory_is_host_memory) {
  return in_pool("Pool", [&] {
    CudaOptions cuda{
        .device = device, .shareable = shareable, .rdma = rdma, .page_size = page_size};
    if (!library.empty()) cuda.library = library;
    cuda.memory_is_host_memory = memory_is_host_memory;
    cuda.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(options.patience);
    return PagePool::create(make_cuda_driver(cuda), options);
  });
}

}  // namespace

void bind_pool(nb::module_& module) {
  nb::enum_<ZeroPolicy>(module, "ZeroPolicy")
      .value("never", ZeroPolicy::never)
      .value("new_owner", ZeroPolicy::new_owner)
      .value("always", ZeroPolicy::always);

  using Counts = PoolCounts;
  bind_fields(
      nb::class_<Counts>(module, "PoolCounts").def(nb::init<std::size_t>(), "budget_pages"_a),
      VT_FIELD(Counts, budget_pages), VT_FIELD(Counts, used), VT_FIELD(Counts, private_copies),
      VT_FIELD(Counts, spare), VT_FIELD(Counts, in_page_sets), VT_FIELD(Counts, mapped),
      VT_FIELD(Counts, active), VT_FIELD(Counts, prefetched), VT_FIELD(Counts, cached),
      VT_FIELD(Counts, pinned), VT_FIELD(Counts, evicted), VT_FIELD(Counts, orphaned),
      VT_FIELD(Counts, reserved_pages), VT_FIELD(Counts, asleep), VT_FIELD(Counts, buffers),
      VT_FIELD(Counts, held_elsewhere), VT_FIELD(Counts, held_by_readers));

  using Events = PoolEvents;
  bind_fields(nb::class_<Events>(module, "PoolEvents"), VT_FIELD(Events, growths_ready),
              VT_FIELD(Events, growths_mapped), VT_FIELD(Events, pages_recycled),
              VT_FIELD(Events, pages_fresh), VT_FIELD(Events, tensors_reused),
              VT_FIELD(Events, tensors_fresh));

  using Bytes = std::size_t;
  using Time = std::chrono::nanoseconds;
  nb::class_<PoolOptions>(module, "PoolOptions")
      .def(nb::init<Bytes, std::string, ZeroPolicy, Bytes, Bytes, Bytes, Bytes, Time>(),
           nb::kw_only(), "budget"_a, "shared_budget"_a, "zero"_a, "prefetch"_a, "cache"_a,
           "spare"_a, "device_reserve"_a, "patience"_a, "Sizes in bytes, times in seconds.");

  nb::class_<PagePool>(module, "PagePool")
      .def_prop_ro("page_size", &PagePool::page_size)
      .def_prop_ro("granularity", [](PagePool& pool) { return pool.traits().granularity; })
      .def_prop_ro("looks_ahead", &PagePool::looks_ahead)
      .def_prop_ro("budget_pages", [](PagePool& pool) { return pool.store().budget(); })
      .def_prop_ro("kernel_copies_on_write",
                   [](PagePool& pool) { return pool.traits().kernel_copies_on_write; })
      .def_prop_ro("device", [](PagePool& pool) { return as_pair(pool.traits().device); })
      .def_prop_ro("sharing", [](PagePool& pool) { return name_of(pool.traits().exports); })
      .def("counts", pool_method("Pool.stats", &PagePool::counts))
      .def("events", pool_method("Pool.stats", &PagePool::events))
      .def_prop_ro("broken", &broken)
      .def("raise_if_broken", [](PagePool& pool) { pool.store().raise_if_broken(); })
      .def("driver_calls", &driver_calls)
      .def("set_budget", pool_method("Pool.budget", &PagePool::set_budget))
      .def("trim", pool_method("Pool.trim", &PagePool::trim))
      .def("wait_idle", pool_method("Pool.wait_idle", &PagePool::wait_idle))
      .def("retire", pool_method("Pool.close", &PagePool::retire))
      .def("keep_mapped", &PagePool::keep_mapped)
      .def("check_invariants", pool_method("check_invariants", &PagePool::check_invariants))
      .def("fail_after",
           [](PagePool& pool, std::uint64_t skip, std::uint64_t refuse) {
             pool.driver().meter().fail_after(skip, refuse);
           })
      .def("refused_calls",
           [](PagePool& pool) {
             return by_name([&](Call call) { return pool.driver().meter().refused(call); });
           })
      .def("disarm", [](PagePool& pool) { pool.driver().meter().disarm(); });

  nb::class_<WeakPool>(module, "WeakPool", "A reference to a pool that does not keep it alive.")
      .def(nb::init<const std::shared_ptr<PagePool>&>(), "pool"_a)
      .def(
          "get", [](const WeakPool& weak) { return weak.pool.lock(); },
          nb::sig("def get(self) -> PagePool | None"))
      .def("leave_mapper", [](WeakPool& weak) {
        // Kept no longer than that: it keeps a shared budget's file open.
        const std::shared_ptr<Mapper> mapper = std::exchange(weak.mapper, nullptr);
        without_gil([&] {
          if (mapper) mapper->outwait(std::chrono::seconds(10));
        });
      });

  using Holder = Ledger::Holder;
  bind_fields(nb::class_<Holder>(module, "BudgetHolder"), VT_FIELD(Holder, process),
              VT_FIELD(Holder, held), VT_FIELD(Holder, cached), VT_FIELD(Holder, spare))
      .def_prop_ro("device", [](const Holder& holder) { return as_pair(holder.device); })
      .def_prop_ro("command",
                   [](const Holder& holder) { return nb::bytes(holder.command.c_str()); });
  using Survey = Ledger::Survey;
  bind_fields(nb::class_<Survey>(module, "BudgetSurvey"), VT_FIELD(Survey, name),
              VT_FIELD(Survey, limit), VT_FIELD(Survey, holders));
  module.def(
      "survey_budgets",
      [](Time patience) { return without_gil([&] { return Ledger::survey(patience); }); },
      "patience"_a,
      "After so many seconds for the pools' figures. Also why some files could not be read.");
  module.def(
      "leave_budgets", [] { without_gil([] { PagePool::leave_budgets(); }); },
      "The process ends: removes the files of shared budgets in which no other has a pool.");

  module.def("free_host_memory", [] { return free_host_memory(); });
  module.def("in_forked_child", [] { return in_forked_child(); });
  module.def("refuse_in_forked_child", &refuse_in_forked_child, "operation"_a);

  module.attr("NO_LIMIT") = std::numeric_limits<std::size_t>::max();
  module.attr("CACHE_BY_BUDGET") = kCacheByBudget;

  module.def("host_pool", &host_pool, "page_size"_a, "options"_a, "shareable"_a,
             "strict_holes"_a = false);
  module.def("cuda_pool", &cuda_pool, "device"_a, "page_size"_a, "options"_a, "shareable"_a,
             "rdma"_a, "library"_a = "", "memory_is_host_memory"_a = false);
}

}  // namespace vtensor::bind
