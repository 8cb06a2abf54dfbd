#include "bind/attention_argument.h"

#include <algorithm>
#include <utility>

#include "bind/torch_bridge.h"

namespace vtensor::bind {

nb::object listed(nb::handle sequence) { return nb::steal(PySequence_List(sequence.ptr())); }

std::string kind_of(nb::handle object) {
  if (!TorchBridge::get().is_tensor(object)) return type_text(object);
  return text(listed(object.attr("shape"))) + " of " + text(object.attr("dtype"));
}

bool is_on_host(nb::handle tensor) { return nb::getattr(tensor, "is_cpu").is(nb::bool_(true)); }

bool Argument::see() {
  dlpack::Tensor found;
  if (!TorchBridge::get().borrow(object, found)) return false;
  seen = found;
  rank = found.ndim;
  const std::int32_t dims = std::min(rank, kMostDims);
  std::copy_n(found.shape, dims, shape.begin());
  std::copy_n(found.strides, dims, strides.begin());
  device = static_cast<std::uint64_t>(found.device.type) << 32 |
           static_cast<std::uint32_t>(found.device.index);
  dtype = static_cast<std::uint64_t>(found.dtype.code) << 8 | found.dtype.bits;
  item_bytes = found.dtype.bits / 8;
  return true;
}

bool Argument::read(std::int32_t heads) {
  if (!TorchBridge::get().is_tensor(object) ||
      !object.attr("layout").is(nb::module_::import_("torch").attr("strided")))
    return false;
  const auto number = [](nb::handle of, bool bind) {
    if (PyLong_CheckExact(of.ptr()) || bind)
      return nb::cast<std::int64_t>(nb::int_(nb::borrow(of)));
    return kUnknown;
  };
  seen.reset();
  nb::object sizes = object.attr("shape"), steps = object.attr("stride")();
  rank = static_cast<std::int32_t>(nb::len(sizes));
  for (std::int32_t i = 0; i < std::min(rank, kMostDims); ++i) {
    const auto at = static_cast<std::size_t>(i);
    shape[at] = number(sizes[at], heads != 0 && (i == rank - 1 || i == rank - heads));
    strides[at] = number(steps[at], heads != 0 && i == rank - 1);
  }
  nb::object of_torch = object.attr("dtype");
  device = static_cast<std::uint64_t>(nb::hash(object.attr("device")));
  dtype = reinterpret_cast<std::uintptr_t>(of_torch.ptr());
  item_bytes = nb::cast<std::int64_t>(of_torch.attr("itemsize"));
  return true;
}

void Argument::look_for_core() {
  TorchBridge& torch = TorchBridge::get();
  if (torch.is_plain(object)) return;
  nb::object found = nb::getattr(object, "_core", nb::none());
  if (found.is_none() || !nb::try_cast(found, core)) return;
  if (core->closed()) torch.detach(object);  // raises Closed
}

void Argument::transpose_from(std::size_t dim) {
  if (core == nullptr || rank != kMostDims || core->spec().grow_dim != dim) return;
  transposed = true;
  std::swap(shape[1], shape[2]);
  std::swap(strides[1], strides[2]);
}

std::string Argument::sizes() const {
  nb::object list = listed(object.attr("shape"));
  if (transposed) list.attr("insert")(1, list.attr("pop")(2));
  return text(list);
}

std::optional<Numbers> numbers_of(nb::handle object, bool wide) {
  Argument t{object};
  if (!t.see() && !t.read(0)) return {};
  const bool integers =
      t.seen ? t.seen->dtype.code == dlpack::kInt : t.attribute("dtype").starts_with("torch.int");
  if (t.rank != 1 || !integers || !(t.item_bytes == 4 || (wide && t.item_bytes == 8))) return {};
  Numbers numbers{t.shape[0]};
  // A tensor without memory is a tracer's.
  if (!t.seen || t.seen->data == nullptr || !is_on_host(object)) return numbers;
  numbers.found.resize(static_cast<std::size_t>(numbers.count));
  Address at = t.address();
  for (std::int64_t& number : numbers.found) {
    number = t.item_bytes == 4 ? *reinterpret_cast<const std::int32_t*>(at)
                               : *reinterpret_cast<const std::int64_t*>(at);
    at += static_cast<Address>(t.strides[0] * t.item_bytes);
  }
  return numbers;
}

}  // namespace vtensor::bind
