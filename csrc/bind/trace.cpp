// Bindings for reading recordings. vtensor/trace.py wraps them in a context manager.
#include "base/trace.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string_view.h>

#include <array>
#include <string_view>
#include <vector>

#include "bind/bindings.h"
#include "bind/released_gil.h"

namespace vtensor::bind {

namespace {

// Rows in the order of the fields of vtensor.trace.Event. Equal names are one object, because there
// may be a million rows.
nb::list rows(const trace::Recording& recording) {
  std::vector<trace::Event> events;
  {
    const ReleasedGil released;
    events = recording.events();
  }
  const auto whats = nb::cast<nb::list>(nb::cast(trace::kWhatNames));
  const auto roles =
      nb::cast<nb::list>(nb::cast(std::array<std::string_view, 2>{"caller", "mapper"}));
  auto calls = nb::cast<nb::list>(nb::cast(kCallNames));
  calls.append("");  // Call::count_
  nb::list rows;
  for (const trace::Event& event : events) {
    rows.append(
        nb::make_tuple(event.begin, event.duration, whats[static_cast<std::size_t>(event.what)],
                       calls[static_cast<std::size_t>(event.call)], event.address, event.bytes,
                       event.subject, event.thread, roles[static_cast<std::size_t>(event.role)]));
  }
  return rows;
}

}  // namespace

void bind_trace(nb::module_& module) {
  using trace::Recording;
  const auto released = nb::call_guard<ReleasedGil>();
  module.attr("TRACE_KINDS") = nb::tuple(nb::cast(trace::kWhatNames));
  nb::class_<Recording>(module, "TraceRecording")
      .def(nb::init<std::size_t>(), nb::arg("capacity") = Recording::kDefaultCapacity, released)
      .def("stop", &Recording::stop, released)
      .def("events", &rows)
      .def_prop_ro("dropped", &Recording::dropped, released)
      .def_prop_ro("capacity", &Recording::capacity)
      .def_prop_ro("started", &Recording::started);
}

}  // namespace vtensor::bind
