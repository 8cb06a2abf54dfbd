// Turns reports of faults on and off. vtensor/_base/faults.py says what they are.
#include "base/fault_report.h"
#include "bind/bindings.h"

namespace vtensor::bind {

void bind_faults(nb::module_& module) {
  module.def("explain_faults", &faults::explain, nb::arg("to"));
  module.def("explain_no_faults", &faults::explain_nothing);
}

}  // namespace vtensor::bind
