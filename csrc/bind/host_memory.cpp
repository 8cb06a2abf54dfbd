#include "bind/host_memory.h"

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "base/errors.h"

namespace vtensor::bind {

namespace nb = nanobind;

namespace {

nb::object make(const char* operation, std::size_t bytes, bool pinned) {
  nb::module_ torch = nb::module_::import_("torch");
  try {
    // Names the device and the dtype, because the program may have set other defaults.
    return torch.attr("empty")(bytes, nb::arg("dtype") = torch.attr("uint8"),
                               nb::arg("device") = "cpu", nb::arg("pin_memory") = pinned);
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_RuntimeError) && !error.matches(PyExc_MemoryError)) throw;
    throw OutOfPages("[" + std::string(operation) + "] need " + std::to_string(bytes) +
                     " bytes of " + (pinned ? "page-locked " : "") +
                     "host memory, which cannot be had (" + nb::str(error.value()).c_str() +
                     "): free some, or free the slot and compute it again");
  }
}

}  // namespace

std::shared_ptr<std::byte> allocate_host_memory(const char* operation, std::size_t bytes,
                                                bool pinned) {
  const nb::gil_scoped_acquire gil;
  nb::object tensor = make(operation, bytes, pinned);
  auto* const data =
      reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()));
  return {data, [owner = tensor.release()](std::byte*) {
            if (Py_IsInitialized() == 0) return;
            const nb::gil_scoped_acquire gil;
            owner.dec_ref();
          }};
}

}  // namespace vtensor::bind
