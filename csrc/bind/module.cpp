// The module, and the translation of the errors of base/errors.h to the classes of vtensor.errors.
#include <nanobind/stl/string.h>

#include <exception>
#include <new>
#include <system_error>

#include "base/errors.h"
#include "base/fault_report.h"
#include "bind/bindings.h"

namespace vtensor::bind {

namespace {

// Looked up in a copy of the module's dict, made once and kept for ever: finalizers call this
// module when the interpreter imports nothing more and has cleared its modules.
nb::object error_class(const char* name) {
  static const nb::handle classes =
      nb::module_::import_("vtensor.errors").attr("__dict__").attr("copy")().release();
  return classes[name];
}

void raise(const char* name, const char* message) {
  PyErr_SetString(error_class(name).ptr(), message);
}

void set_error(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const DeviceOutOfMemory& error) {
    raise("OutOfPages", error.what());
  } catch (const DriverError& error) {
    nb::object type = error_class("DriverError");
    nb::object instance = type(error.what(), error.call, error.code, error.name);
    PyErr_SetObject(type.ptr(), instance.ptr());
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
          "its limits (ulimit -v, ulimit -d)");
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

}  // namespace vtensor::bind

NB_MODULE(_core, module) {
  using namespace vtensor;
  module.doc() = "The C++ half of vtensor; use the classes of the package `vtensor` instead.";
  // Tensors that live until the interpreter exits do not leak: the pool's exit handler closes them.
  nanobind::set_leak_warnings(false);
  bind::error_class("VTensorError");  // makes that copy
  nanobind::register_exception_translator(bind::translate, nullptr);
  bind::bind_pool(module);
  bind::bind_tensor(module);
  bind::bind_reader(module);
  bind::bind_lease(module);
  bind::bind_slot_cache(module);
  bind::bind_arena(module);
  bind::bind_heap(module);
  bind::bind_sleep(module);
  bind::bind_attention(module);
  bind::bind_trace(module);
  module.def("explain_faults", &faults::explain, nanobind::arg("to"));
  module.def("explain_no_faults", &faults::explain_nothing);
}
