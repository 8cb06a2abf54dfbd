#include "bind/torch_bridge.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/calls.h"
#include "base/errors.h"
#include "bind/arguments.h"
#include "tensor/buffer.h"

namespace vtensor::bind {

nb::object call(nb::handle callable, std::initializer_list<PyObject*> arguments) {
  PyObject* result =
      PyObject_Vectorcall(callable.ptr(), arguments.begin(), arguments.size(), nullptr);
  if (!result) throw nb::python_error();
  return nb::steal(result);
}

TorchBridge& TorchBridge::get() {
  // Never destroyed: it holds Python objects, and the interpreter may end first.
  static TorchBridge* bridge = new TorchBridge();
  return *bridge;
}

TorchBridge::TorchBridge() {
  const nb::object capsule = tensor_type_.attr("__dlpack_c_exchange_api__");
  api_ = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!api_) throw nb::python_error();
  if (api_->version.major != 1)
    throw Error("[vtensor] torch has DLPack ", api_->version.major, ": need 1");
}

Stream TorchBridge::current_stream(Device device) {
  if (device.type != 2) return 0;
  void* stream = nullptr;
  if (api_->current_stream(device.type, device.index, &stream) != 0) throw nb::python_error();
  return reinterpret_cast<Stream>(stream);
}

bool TorchBridge::empty_cache() {
  try {
    torch_.attr("cuda").attr("empty_cache")();
    return true;
  } catch (nb::python_error& error) {
    // torch 2.11 raises an internal error during a capture.
    if (!error.matches(PyExc_RuntimeError)) throw;
    return false;
  }
}

bool TorchBridge::borrow(nb::handle object, dlpack::Tensor& seen) {
  const auto type = reinterpret_cast<PyTypeObject*>(tensor_type_.ptr());
  if (!PyObject_TypeCheck(object.ptr(), type)) return false;
  if (api_->tensor_from_object(object.ptr(), &seen) == 0) return true;
  PyErr_Clear();  // a dtype that DLPack has no number for
  return false;
}

bool TorchBridge::read(nb::handle tensor, TensorFacts& facts) {
  if (dlpack::Tensor seen; borrow(tensor, seen)) {
    facts.data = static_cast<char*>(seen.data) + seen.byte_offset;
    facts.item_bytes = seen.dtype.bits * seen.dtype.lanes / 8;
    facts.dtype = seen.dtype;
    facts.device = seen.device;
    facts.shape.assign(seen.shape, seen.shape + seen.ndim);
    facts.strides.assign(seen.strides, seen.strides + seen.ndim);
    return true;
  }
  if (!nb::getattr(tensor, "layout").is(torch_.attr("strided"))) return false;
  if (is_true(tensor.attr("is_nested"))) return false;
  nb::object device = tensor.attr("device"), index = device.attr("index");
  const auto type = nb::cast<std::string>(device.attr("type"));  // a copy: torch keeps no str of it
  try {
    facts.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_RuntimeError)) throw;
    facts.data = nullptr;  // torch.func's wrappers have no storage
  }
  facts.item_bytes = nb::cast<std::size_t>(tensor.attr("itemsize"));
  facts.dtype = {};
  facts.device.type = type == "cpu" ? 1 : type == "cuda" ? 2 : 0;
  facts.device.index = index.is_none() ? 0 : nb::cast<std::int32_t>(index);
  facts.shape = nb::cast<std::vector<std::int64_t>>(tensor.attr("shape"));
  facts.strides = nb::cast<std::vector<std::int64_t>>(tensor.attr("stride")());
  return true;
}

namespace {

// References that Python's main thread drops soon, for the mapper, which never waits for the GIL
// (I11).
class DroppedSoon {
 public:
  void add(PyObject* owner) noexcept {
    try {
      const std::lock_guard lock(mutex_);
      all_.push_back(owner);
    } catch (const std::exception&) {
      return;  // it is never dropped
    }
    // If Python's queue is full, a later call drops this one too.
    static_cast<void>(Py_AddPendingCall(&DroppedSoon::drop, this));
  }

 private:
  static int drop(void* self) {
    std::vector<PyObject*> all;
    {
      auto& [mutex, waiting] = *static_cast<DroppedSoon*>(self);
      const std::lock_guard lock(mutex);
      all.swap(waiting);
    }
    for (PyObject* const owner : all) Py_DECREF(owner);
    return 0;
  }

  std::mutex mutex_;
  std::vector<PyObject*> all_;
};

}  // namespace

std::shared_ptr<std::byte> TorchBridge::host_memory(const char* operation, std::size_t bytes,
                                                    bool pinned, const char* remedy) {
  const nb::gil_scoped_acquire gil;
  nb::object tensor;
  try {
    tensor = empty_bytes_(bytes, pinned);
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_RuntimeError) && !error.matches(PyExc_MemoryError)) throw;
    throw OutOfPages("[", operation, "] need ", bytes, " bytes of ", pinned ? "page-locked " : "",
                     "host memory, which cannot be had (", text(error.value()), "): ", remedy);
  }
  const auto data = nb::cast<std::uintptr_t>(tensor.attr("data_ptr")());
  return {reinterpret_cast<std::byte*>(data), [owner = tensor.release()](std::byte*) {
            if (Py_IsInitialized() == 0) return;
            if (thread_role == ThreadRole::mapper) {
              static DroppedSoon* const soon = new DroppedSoon();  // never destroyed
              return soon->add(owner.ptr());
            }
            const nb::gil_scoped_acquire gil;
            owner.dec_ref();
          }};
}

namespace {

// A tensor of bytes as DLPack hands it over, which ends with torch's storage.
struct Export {
  dlpack::ManagedTensorVersioned managed;
  std::int64_t bytes, stride = 1;
  std::shared_ptr<void> owner;
};

}  // namespace

Disabled::Disabled(nb::handle count, nb::handle disable) {
  if (nb::cast<std::size_t>(call(count, {})) == 0) return;
  disabled_ = call(disable, {});
  disabled_.attr("__enter__")();
}

Disabled::~Disabled() {
  if (!any()) return;
  const nb::error_scope pending;  // of the call that ended early
  disabled_.attr("__exit__")(nb::none(), nb::none(), nb::none());
}

nb::object TorchBridge::storage_over(std::shared_ptr<void> owner, Device device, Address address,
                                     std::size_t bytes) {
  const Disabled modes = without_modes();  // transforms leave the storage alone
  auto* exported = new Export{
      .managed = {}, .bytes = static_cast<std::int64_t>(bytes), .owner = std::move(owner)};
  dlpack::ManagedTensorVersioned& managed = exported->managed;
  managed.version = {1, 0};
  managed.context = exported;
  managed.deleter = [](dlpack::ManagedTensorVersioned* ended) {
    const std::unique_ptr<Export> exported(static_cast<Export*>(ended->context));
  };
  managed.tensor = {reinterpret_cast<void*>(address),
                    device,
                    1,
                    dlpack::kUint8,
                    &exported->bytes,
                    &exported->stride,
                    0};
  void* tensor = nullptr;
  if (api_->object_from_managed(&managed, &tensor) != 0) throw nb::python_error();
  nb::object storage = this->storage(nb::steal(static_cast<PyObject*>(tensor)));
  // Torch keeps the Python object and its attributes as long as the storage lives. Copying the
  // whole dict takes half the time of setting each attribute.
  nb::object attributes = nb::steal(PyDict_Copy(private_.ptr()));
  if (!attributes.is_valid() ||
      PyObject_GenericSetDict(storage.ptr(), attributes.ptr(), nullptr) != 0)
    throw nb::python_error();
  return storage;
}

nb::object TorchBridge::storage_over(Generation* generation, Address address, std::size_t bytes) {
  const Device device = generation->client->pool()->traits().device;
  const auto end = [](Generation* ended) { ended->client->pool()->end(ended); };
  return storage_over(std::shared_ptr<void>(generation, end), device, address, bytes);
}

nb::object TorchBridge::detach(nb::handle tensor) {
  const Disabled modes = without_modes(), transforms = without_transforms();
  return call(detach_, {tensor.ptr()});
}

nb::object TorchBridge::empty_storage(nb::handle device) {
  return storage_type_(0, nb::arg("device") = device);
}

void TorchBridge::set(nb::handle tensor, nb::handle storage, std::size_t offset, nb::handle sizes,
                      nb::handle strides) {
  const Disabled modes = without_modes();
  const nb::int_ at(offset);
  const auto set = [&] {
    call(set_, {tensor.ptr(), storage.ptr(), at.ptr(), sizes.ptr(), strides.ptr()});
  };
  try {
    set();
  } catch (nb::python_error&) {
    // Transforms refuse it. Asking for them each time would cost a tenth of an extend().
    const Disabled transforms = without_transforms();
    if (!transforms.any()) throw;
    set();
  }
}

nb::object TorchBridge::narrow(nb::handle tensor, std::size_t dim, std::size_t start,
                               std::size_t length) {
  const Disabled modes = without_modes(), transforms = without_transforms();
  return narrowed(tensor, dim, start, length);
}

nb::object TorchBridge::narrowed(nb::handle tensor, std::size_t dim, std::size_t start,
                                 std::size_t length) {
  nb::int_ at_dim(dim), at(start), n(length);
  return call(narrow_, {tensor.ptr(), at_dim.ptr(), at.ptr(), n.ptr()});
}

void TorchBridge::copy_into(nb::handle tensor, std::size_t dim, std::size_t start,
                            std::size_t length, nb::handle source) {
  const Disabled modes = without_modes(), transforms = without_transforms();
  nb::object target = narrowed(call(detach_, {tensor.ptr()}), dim, start, length);
  call(copy_, {target.ptr(), source.ptr()});
}

}  // namespace vtensor::bind
