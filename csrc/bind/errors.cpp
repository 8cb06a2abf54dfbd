// Translates the errors of base/errors.h to the classes of vtensor.errors.
#include "base/errors.h"

#include <nanobind/stl/string.h>

#include <exception>
#include <new>
#include <system_error>

#include "bind/bindings.h"

namespace vtensor::bind {

namespace {

void raise(const char* name, const char* message) {
  nb::object type = nb::module_::import_("vtensor.errors").attr(name);
  PyErr_SetString(type.ptr(), message);
}

void raise(const DriverError& error) {
  nb::object type = nb::module_::import_("vtensor.errors").attr("DriverError");
  nb::object instance = type(error.what(), error.call, error.code, error.name);
  PyErr_SetObject(type.ptr(), instance.ptr());
}

void set_error(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const DeviceOutOfMemory& error) {
    raise("OutOfPages", error.what());
  } catch (const DriverError& error) {
    raise(error);
  } catch (const OutOfPages& error) {
    raise("OutOfPages", error.what());
  } catch (const CapacityExceeded& error) {
    raise("CapacityExceeded", error.what());
  } catch (const InvalidArgument& error) {
    raise("InvalidArgument", error.what());
  } catch (const NoFreeSlot& error) {
    raise("NoFreeSlot", error.what());
  } catch (const TimedOut& error) {
    raise("TimedOut", error.what());
  } catch (const Asleep& error) {
    raise("Asleep", error.what());
  } catch (const Closed& error) {
    raise("Closed", error.what());
  } catch (const Error& error) {
    raise("VTensorError", error.what());
  } catch (const std::system_error& error) {
    nb::object arguments = nb::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  } catch (const std::bad_alloc&) {
    raise("OutOfPages",
          "[vtensor] the process has no memory left for vtensor's own tables: free some, or raise "
          "its limit (ulimit -v)");
  }
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    set_error(thrown);
  } catch (nb::python_error& raised) {
    raised.restore();  // it came while the error was made, as Ctrl-C does (I17)
  }
}

}  // namespace

void bind_errors(nb::module_&) { nb::register_exception_translator(translate, nullptr); }

}  // namespace vtensor::bind
