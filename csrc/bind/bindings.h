// One function for each subject. module.cpp calls them in this order.
#pragma once

#include <nanobind/nanobind.h>

namespace vtensor::bind {

namespace nb = nanobind;
using namespace nb::literals;

void bind_pool(nb::module_& module);
void bind_tensor(nb::module_& module);
void bind_reader(nb::module_& module);
void bind_lease(nb::module_& module);
void bind_slot_cache(nb::module_& module);
void bind_arena(nb::module_& module);
void bind_heap(nb::module_& module);
void bind_sleep(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_trace(nb::module_& module);

// Binds fields of a struct as read-only properties, each given as a VT_FIELD.
#define VT_FIELD(Struct, field) #field, &Struct::field
template <typename Struct>
nb::class_<Struct> bind_fields(nb::class_<Struct> bound) {
  return bound;
}
template <typename Struct, typename Field, typename... More>
nb::class_<Struct> bind_fields(nb::class_<Struct> bound, const char* name, Field Struct::* field,
                               More... more) {
  return bind_fields(bound.def_ro(name, field), more...);
}

}  // namespace vtensor::bind
