// Conversions of Python arguments. An error names the operation and the argument. Bindings take
// such arguments as nb::handle, because errors of nanobind's own conversions name neither.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/errors.h"

namespace vtensor::bind {

namespace nb = nanobind;

template <typename... Parts>
[[noreturn]] void refuse(const char* operation, const Parts&... parts) {
  throw InvalidArgument("[", operation, "] ", parts...);
}

using vtensor::text;
// str(), for messages.
inline std::string text(nb::handle object) { return nb::str(object).c_str(); }

// "a str", "an int", for messages.
inline std::string type_text(nb::handle value) {
  const std::string name = text(value.type().attr("__name__"));
  const bool vowel = std::string_view("AEIOaeio").find(name[0]) != std::string_view::npos;
  return (vowel ? "an " : "a ") + name;
}

// Turns the present TypeError into InvalidArgument. Other errors come from the argument and pass.
[[noreturn]] inline void refuse_type(const char* operation, const char* name, nb::handle value,
                                     const char* wanted) {
  if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
  PyErr_Clear();
  refuse(operation, name, " is ", type_text(value), ": give ", wanted);
}

// An integer as 64 bits. A larger one becomes the nearest limit, which is out of every range too.
inline std::int64_t integer(const char* operation, const char* name, nb::handle value) {
  nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) refuse_type(operation, name, value, "an integer");
  int overflow = 0;
  const long long result = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) return overflow > 0 ? INT64_MAX : INT64_MIN;
  return result;
}

inline bool truth(const char* operation, const char* name, nb::handle value) {
  const int result = PyObject_IsTrue(value.ptr());
  if (result < 0) refuse_type(operation, name, value, "a bool");
  return result == 1;
}

// `make(value)` of each item of the iterable `values`.
template <typename Make>
auto each(const char* operation, const char* name, nb::handle values, Make make) {
  nb::object iterator = nb::steal(PyObject_GetIter(values.ptr()));
  if (!iterator.is_valid()) refuse_type(operation, name, values, "a sequence");
  std::vector<decltype(make(nb::handle()))> made;
  while (PyObject* value = PyIter_Next(iterator.ptr())) {
    const nb::object held = nb::steal(value);
    made.push_back(make(held));
  }
  if (PyErr_Occurred()) throw nb::python_error();
  return made;
}

inline std::vector<std::int64_t> integers(const char* operation, const char* name,
                                          nb::handle values) {
  return each(operation, name, values,
              [&](nb::handle value) { return integer(operation, name, value); });
}

}  // namespace vtensor::bind

// A number of seconds, as Python gives it.
template <>
struct nanobind::detail::type_caster<std::chrono::nanoseconds> {
  NB_TYPE_CASTER(std::chrono::nanoseconds, const_name("float"))

  bool from_python(handle source, std::uint8_t flags, cleanup_list* cleanup) noexcept {
    make_caster<double> seconds;
    if (!seconds.from_python(source, flags, cleanup)) return false;
    value = std::chrono::duration_cast<Value>(std::chrono::duration<double>(seconds.value));
    return true;
  }
};
