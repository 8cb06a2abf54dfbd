// Torch's functions for the bindings, through Python and DLPack. It uses no PyTorch header, so one
// build serves every release.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "bind/dlpack_abi.h"
#include "driver/driver.h"
#include "policy/generation.h"

namespace vtensor::bind {

namespace nb = nanobind;

// The present address, device, dtype, shape and strides of a torch tensor.
struct TensorFacts {
  void* data = nullptr;
  std::size_t item_bytes = 0;
  dlpack::DataType dtype{};  // zeros if DLPack has no number for it
  Device device{};
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;

  // A fake tensor has elements and none.
  bool has_memory() const {
    return data != nullptr || std::find(shape.begin(), shape.end(), 0) != shape.end();
  }
  // Whether the dtypes are one, as far as DLPack can tell.
  bool has_dtype_of(const TensorFacts& other) const {
    return dtype == other.dtype && !(dtype == dlpack::DataType{});
  }
  bool may_be_complex() const {
    return dtype == dlpack::DataType{} || dtype.code == dlpack::kComplex;
  }
};

// Calls by vectorcall. Throws python_error.
nb::object call(nb::handle callable, std::initializer_list<PyObject*> arguments);

// A scope without what would turn our tensors into tensors of its own: modes such as
// FakeTensorMode, or the transforms of torch.func. `disable` makes the scope, if `count` counts
// any.
class Disabled {
 public:
  Disabled(nb::handle count, nb::handle disable);
  ~Disabled();
  Disabled& operator=(Disabled&&) = delete;
  bool any() const { return disabled_.is_valid(); }

 private:
  nb::object disabled_;
};

// torch's functions, looked up once.
class TorchBridge {
 public:
  static TorchBridge& get();

  // Reads a tensor by DLPack's C exchange API. The result is valid until the tensor changes. False
  // if `object` is no tensor, or one that DLPack cannot describe.
  bool borrow(nb::handle object, dlpack::Tensor& seen);
  // False if `tensor` is not strided, or nested. Ignores conjugate and negative bits.
  bool read(nb::handle tensor, TensorFacts& facts);

  // A storage over memory that `owner` keeps. It refuses to be shared with other processes.
  nb::object storage_over(std::shared_ptr<void> owner, Device device, Address address,
                          std::size_t bytes);
  // A storage over the extent of `generation`, which ends with the storage.
  nb::object storage_over(Generation* generation, Address address, std::size_t bytes);
  nb::object empty_storage(nb::handle device);
  // The storage of `tensor`. All tensors over it share this Python object.
  nb::object storage(nb::handle tensor) { return call(untyped_storage_, {tensor.ptr()}); }

  void set(nb::handle tensor, nb::handle storage, std::size_t offset, nb::handle sizes,
           nb::handle strides);
  nb::object detach(nb::handle tensor);
  nb::object narrow(nb::handle tensor, std::size_t dim, std::size_t start, std::size_t length);
  void copy_into(nb::handle tensor, std::size_t dim, std::size_t start, std::size_t length,
                 nb::handle source);

  bool is_tensor(nb::handle object) {
    return PyObject_IsInstance(object.ptr(), tensor_type_.ptr()) == 1;
  }
  // Whether it is exactly a torch.Tensor or Parameter, which can be read without side effects.
  bool is_plain(nb::handle object) {
    const nb::handle type = object.type();
    return type.is(tensor_type_) || type.is(parameter_type_);
  }
  bool is_negative(nb::handle tensor) { return is_true(call(is_neg_, {tensor.ptr()})); }
  bool is_conjugate(nb::handle tensor) { return is_true(call(is_conj_, {tensor.ptr()})); }
  bool gradients_enabled() { return is_true(call(grad_enabled_, {})); }

  // torch's current stream of a CUDA device; 0 for others.
  Stream current_stream(Device device);
  // Makes torch give back its cached memory. False if it cannot, such as during a capture.
  bool empty_cache();
  // Host memory, which torch's allocator keeps for the next request. `pinned`: page-locked, so that
  // copies overlap with kernels. Throws OutOfPages. May be called and released with or without the
  // GIL.
  std::shared_ptr<std::byte> host_memory(const char* operation, std::size_t bytes, bool pinned,
                                         const char* remedy);

 private:
  TorchBridge();
  nb::object narrowed(nb::handle tensor, std::size_t dim, std::size_t start, std::size_t length);
  Disabled without_modes() const { return {count_modes_, disable_modes_}; }
  Disabled without_transforms() const { return {count_transforms_, disable_transforms_}; }
  static bool is_true(nb::handle object) { return object.is(nb::bool_(true)); }

  const nb::object torch_ = nb::module_::import_("torch");
  const nb::object tensor_type_ = torch_.attr("Tensor");
  const nb::object parameter_type_ = torch_.attr("nn").attr("Parameter");
  const nb::object storage_type_ = torch_.attr("UntypedStorage");
  const nb::object set_ = tensor_type_.attr("set_");
  const nb::object detach_ = tensor_type_.attr("detach");
  const nb::object narrow_ = tensor_type_.attr("narrow");
  const nb::object copy_ = tensor_type_.attr("copy_");
  const nb::object untyped_storage_ = tensor_type_.attr("untyped_storage");
  const nb::object is_neg_ = tensor_type_.attr("is_neg");
  const nb::object is_conj_ = tensor_type_.attr("is_conj");
  const nb::object grad_enabled_ = torch_.attr("is_grad_enabled");
  const nb::object count_modes_ = torch_.attr("_C").attr("_len_torch_dispatch_stack");
  const nb::object disable_modes_ = torch_.attr("_C").attr("_DisableTorchDispatch");
  const nb::object count_transforms_ =
      torch_.attr("_C").attr("_functorch").attr("get_dynamic_layer_stack_depth");
  const nb::object disable_transforms_ = torch_.attr("_C").attr("_DisableFuncTorch");
  // Attributes for storages of ours.
  const nb::object private_ =
      nb::module_::import_("vtensor._base.processes").attr("STORAGE_METHODS");
  const nb::object empty_bytes_ =
      nb::module_::import_("vtensor._base.torch_modes").attr("empty_bytes");
  const dlpack::ExchangeApi* api_ = nullptr;
};

}  // namespace vtensor::bind
