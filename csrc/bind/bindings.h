// One function for each subject. module.cpp calls them in this order.
#pragma once

#include <nanobind/nanobind.h>

namespace vtensor::bind {

void bind_errors(nanobind::module_& module);
void bind_pool(nanobind::module_& module);
void bind_tensor(nanobind::module_& module);
void bind_lease(nanobind::module_& module);
void bind_slot_cache(nanobind::module_& module);
void bind_arena(nanobind::module_& module);
void bind_heap(nanobind::module_& module);
void bind_sleep(nanobind::module_& module);
void bind_attention_spec(nanobind::module_& module);
void bind_trace(nanobind::module_& module);
void bind_faults(nanobind::module_& module);

// Binds fields of a struct as read-only properties, each given as a VT_FIELD.
#define VT_FIELD(Struct, field) #field, &Struct::field
template <typename Struct>
nanobind::class_<Struct> bind_fields(nanobind::class_<Struct> bound) {
  return bound;
}
template <typename Struct, typename Field, typename... More>
nanobind::class_<Struct> bind_fields(nanobind::class_<Struct> bound, const char* name,
                                     Field Struct::* field, More... more) {
  return bind_fields(bound.def_ro(name, field), more...);
}

}  // namespace vtensor::bind
