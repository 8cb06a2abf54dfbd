#include "bind/bindings.h"

NB_MODULE(_core, module) {
  module.doc() = "The C++ half of vtensor; use the classes of the package `vtensor` instead.";
  // Tensors that live until the interpreter exits do not leak: the pool's exit handler closes them.
  nanobind::set_leak_warnings(false);
  vtensor::bind::bind_errors(module);
  vtensor::bind::bind_pool(module);
  vtensor::bind::bind_tensor(module);
  vtensor::bind::bind_reader(module);
  vtensor::bind::bind_lease(module);
  vtensor::bind::bind_slot_cache(module);
  vtensor::bind::bind_arena(module);
  vtensor::bind::bind_heap(module);
  vtensor::bind::bind_sleep(module);
  vtensor::bind::bind_attention(module);
  vtensor::bind::bind_trace(module);
  vtensor::bind::bind_faults(module);
}
