#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <limits>
#include <memory>
#include <string>

#include "base/errors.h"
#include "base/process.h"
#include "bind/bindings.h"
#include "bind/operation.h"
#include "bind/released_gil.h"
#include "driver/driver.h"
#include "policy/page_pool.h"

namespace vtensor::bind {

namespace nb = nanobind;

namespace {

// Runs `body` without the GIL. Raises in a forked child.
template <typename Body>
auto in_pool(const char* operation, Body body) {
  refuse_in_forked_child(operation);
  const ReleasedGil released;
  return body();
}

std::chrono::nanoseconds seconds(double time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(time));
}

// The calls that there were, with what `count(call)` says of each.
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

// A pool after close(). The PagePool lives until the last view over its pages is gone; this class
// reports from it until then, and its last counts afterwards.
struct ClosedPool {
  explicit ClosedPool(const std::shared_ptr<PagePool>& closed)
      : pool(closed),
        page_size(closed->page_size()),
        budget_pages(closed->store().budget()),
        device(closed->traits().device),
        calls(driver_calls(*closed)),
        events(closed->events()),
        mapper(closed->waker()) {}

  std::weak_ptr<PagePool> pool;
  std::size_t page_size, budget_pages;
  Device device;
  nb::dict calls;
  PoolEvents events;
  Mapper::Waker mapper;
};

PoolCounts counts_of(ClosedPool& closed) {
  refuse_in_forked_child("Pool.stats");
  const std::shared_ptr<PagePool> pool = closed.pool.lock();
  if (!pool) return PoolCounts{.budget_pages = closed.budget_pages};
  const ReleasedGil released;
  return pool->counts();
}

}  // namespace

void bind_pool(nb::module_& module) {
  nb::enum_<ZeroPolicy>(module, "ZeroPolicy")
      .value("never", ZeroPolicy::never)
      .value("new_owner", ZeroPolicy::new_owner)
      .value("always", ZeroPolicy::always);

  nb::class_<PoolCounts>(module, "PoolCounts")
      .def_ro("budget_pages", &PoolCounts::budget_pages)
      .def_ro("used", &PoolCounts::used)
      .def_ro("private_copies", &PoolCounts::private_copies)
      .def_ro("spare", &PoolCounts::spare)
      .def_ro("quarantined", &PoolCounts::quarantined)
      .def_ro("in_children", &PoolCounts::in_children)
      .def_ro("in_page_sets", &PoolCounts::in_page_sets)
      .def_ro("mapped", &PoolCounts::mapped)
      .def_ro("active", &PoolCounts::active)
      .def_ro("prefetched", &PoolCounts::prefetched)
      .def_ro("cached", &PoolCounts::cached)
      .def_ro("pinned", &PoolCounts::pinned)
      .def_ro("orphaned", &PoolCounts::orphaned)
      .def_ro("reserved_pages", &PoolCounts::reserved_pages)
      .def_ro("asleep", &PoolCounts::asleep)
      .def_ro("buffers", &PoolCounts::buffers)
      .def_ro("held_elsewhere", &PoolCounts::held_elsewhere);

  nb::class_<PoolEvents>(module, "PoolEvents")
      .def_ro("growths_ready", &PoolEvents::growths_ready)
      .def_ro("growths_mapped", &PoolEvents::growths_mapped)
      .def_ro("pages_recycled", &PoolEvents::pages_recycled)
      .def_ro("pages_fresh", &PoolEvents::pages_fresh)
      .def_ro("tensors_reused", &PoolEvents::tensors_reused)
      .def_ro("tensors_fresh", &PoolEvents::tensors_fresh);

  nb::class_<PoolOptions>(module, "PoolOptions")
      .def(
          "__init__",
          [](PoolOptions* options, std::size_t budget, const std::string& shared, ZeroPolicy zero,
             std::size_t prefetch, std::size_t cache, std::size_t spare_low, std::size_t spare_high,
             double max_age, std::size_t device_reserve, double patience) {
            new (options) PoolOptions{
                budget,     shared,           zero,           prefetch,         cache, spare_low,
                spare_high, seconds(max_age), device_reserve, seconds(patience)};
          },
          nb::kw_only(), nb::arg("budget"), nb::arg("shared"), nb::arg("zero"), nb::arg("prefetch"),
          nb::arg("cache"), nb::arg("spare_low"), nb::arg("spare_high"), nb::arg("max_age"),
          nb::arg("device_reserve"), nb::arg("patience"), "Sizes in bytes, times in seconds.");

  nb::class_<PagePool>(module, "PagePool")
      .def_prop_ro("page_size", &PagePool::page_size)
      .def_prop_ro("looks_ahead", &PagePool::looks_ahead)
      .def_prop_ro("budget_pages", [](PagePool& pool) { return pool.store().budget(); })
      .def_prop_ro("kernel_copies_on_write",
                   [](PagePool& pool) { return pool.traits().kernel_copies_on_write; })
      .def_prop_ro("device",
                   [](PagePool& pool) {
                     return std::pair(pool.traits().device.type, pool.traits().device.index);
                   })
      .def("counts",
           [](PagePool& pool) { return in_pool("Pool.stats", [&] { return pool.counts(); }); })
      .def("events",
           [](PagePool& pool) { return in_pool("Pool.stats", [&] { return pool.events(); }); })
      .def("driver_calls", &driver_calls)
      .def("set_budget",
           [](PagePool& pool, std::size_t bytes) {
             in_pool("Pool.budget", [&] { pool.set_budget(bytes); });
           })
      .def("prefill",
           [](PagePool& pool, std::size_t pages) {
             refuse_in_forked_child("Pool.prefill");
             with_memory(pool, {"Pool.prefill"}, [&] { pool.prefill(pages); });
           })
      .def("trim", [](PagePool& pool) { return in_pool("Pool.trim", [&] { return pool.trim(); }); })
      .def("wait_idle",
           [](PagePool& pool, double timeout) {
             in_pool("Pool.wait_idle", [&] { pool.wait_idle(seconds(timeout)); });
           })
      .def("retire", [](PagePool& pool) { in_pool("Pool.close", [&] { pool.retire(); }); })
      .def("check_invariants",
           [](PagePool& pool) { in_pool("check_invariants", [&] { pool.check_invariants(); }); })
      .def("fail_after",
           [](PagePool& pool, std::uint64_t skip, std::uint64_t refuse) {
             pool.driver().meter().fail_after(skip, refuse);
           })
      .def("refused_calls",
           [](PagePool& pool) {
             return by_name([&](Call call) { return pool.driver().meter().refused(call); });
           })
      .def("disarm", [](PagePool& pool) { pool.driver().meter().disarm(); });

  nb::class_<ClosedPool>(module, "ClosedPool")
      .def("__init__", [](ClosedPool* self,
                          const std::shared_ptr<PagePool>& pool) { new (self) ClosedPool(pool); })
      .def_ro("page_size", &ClosedPool::page_size)
      .def_ro("budget_pages", &ClosedPool::budget_pages)
      .def_prop_ro(
          "device",
          [](ClosedPool& closed) { return std::pair(closed.device.type, closed.device.index); })
      .def_prop_ro("kernel_copies_on_write", [](ClosedPool&) { return true; })
      .def("counts", &counts_of)
      .def("driver_calls",
           [](ClosedPool& closed) {
             if (const auto pool = closed.pool.lock()) closed.calls = driver_calls(*pool);
             return closed.calls;
           })
      .def("leave_mapper",
           [](ClosedPool& closed) {
             const ReleasedGil released;
             closed.mapper.outwait(std::chrono::seconds(10));
           })
      .def("trim",
           [](ClosedPool& closed) {
             const auto pool = closed.pool.lock();
             return pool ? in_pool("Pool.trim", [&] { return pool->trim(); }) : 0;
           })
      .def("wait_idle",
           [](ClosedPool& closed, double timeout) {
             if (const auto pool = closed.pool.lock())
               in_pool("Pool.wait_idle", [&] { pool->wait_idle(seconds(timeout)); });
           })
      .def("events",
           [](ClosedPool& closed) {
             const auto pool = closed.pool.lock();
             return pool ? in_pool("Pool.stats", [&] { return pool->events(); }) : closed.events;
           })
      .def("check_invariants", [](ClosedPool& closed) {
        if (const auto pool = closed.pool.lock())
          in_pool("check_invariants", [&] { pool->check_invariants(); });
      });

  using Holder = SharedBudget::Holder;
  nb::class_<Holder>(module, "BudgetHolder")
      .def_ro("process", &Holder::process)
      .def_prop_ro(
          "device",
          [](const Holder& holder) { return std::pair(holder.device.type, holder.device.index); })
      .def_prop_ro("command",
                   [](const Holder& holder) { return nb::bytes(holder.command.c_str()); })
      .def_prop_ro("held", [](const Holder& holder) { return holder.bytes.held; })
      .def_prop_ro("cached", [](const Holder& holder) { return holder.bytes.cached; })
      .def_prop_ro("spare", [](const Holder& holder) { return holder.bytes.spare; });
  using Survey = SharedBudget::Survey;
  nb::class_<Survey>(module, "BudgetSurvey")
      .def_ro("name", &Survey::name)
      .def_ro("limit", &Survey::limit)
      .def_ro("holders", &Survey::holders);
  module.def(
      "survey_budgets",
      [](double patience) {
        const ReleasedGil released;
        SharedBudget::Surveys surveys = SharedBudget::survey(seconds(patience));
        return std::pair(std::move(surveys.budgets), std::move(surveys.skipped));
      },
      nb::arg("patience"),
      "After so many seconds for the pools' figures. Also why some files could not be read.");

  module.def("in_forked_child", [] { return in_forked_child.load(std::memory_order_relaxed); });

  module.attr("NO_LIMIT") = std::numeric_limits<std::size_t>::max();
  module.attr("CACHE_BY_BUDGET") = kCacheByBudget;

  module.def(
      "host_pool",
      [](std::size_t page_size, bool strict_holes, const PoolOptions& options) {
        return in_pool("Pool", [&] {
          return PagePool::create(
              make_host_driver({.page_size = page_size, .strict_holes = strict_holes}), options);
        });
      },
      nb::arg("page_size"), nb::arg("strict_holes"), nb::arg("options"));

  module.def(
      "cuda_pool",
      [](int device, std::size_t page_size, const std::string& library, bool memory_is_host_memory,
         const PoolOptions& options) {
        return in_pool("Pool", [&] {
          CudaOptions cuda{.device = device, .page_size = page_size};
          if (!library.empty()) cuda.library = library;
          cuda.memory_is_host_memory = memory_is_host_memory;
          cuda.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(options.patience);
          return PagePool::create(make_cuda_driver(cuda), options);
        });
      },
      nb::arg("device"), nb::arg("page_size"), nb::arg("library"), nb::arg("memory_is_host_memory"),
      nb::arg("options"));
}

}  // namespace vtensor::bind
