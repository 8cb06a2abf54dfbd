// Torch's functions for the bindings, through Python and DLPack. It uses no PyTorch header, so one
// build serves every release.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "bind/dlpack_abi.h"
#include "driver/driver.h"
#include "policy/generation.h"

namespace vtensor::bind {

namespace nb = nanobind;

// The present address, device, shape and strides of a torch tensor.
struct TensorFacts {
  void* data = nullptr;
  dlpack::Device device{};
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
};

// torch's functions, looked up once.
class TorchBridge {
 public:
  static TorchBridge& get();

  // Reads a tensor by DLPack's C exchange API. The result is valid until the tensor changes. False
  // if `object` is no tensor, or one that DLPack cannot describe.
  bool borrow(nb::handle object, dlpack::Tensor& seen);
  // False if `tensor` is not strided. Ignores conjugate and negative bits.
  bool read(nb::handle tensor, TensorFacts& facts);

  // A storage over `generation`, whose end ends the generation. `address` and `bytes` are the
  // extent. The storage refuses to be shared with other processes.
  nb::object storage_over(Generation* generation, Address address, std::size_t bytes,
                          Device device);
  nb::object empty_storage(nb::handle device);
  // The storage of `tensor`. All tensors over it share this Python object.
  nb::object storage(nb::handle tensor);

  void set(nb::handle tensor, nb::handle storage, std::size_t offset, nb::handle sizes,
           nb::handle strides);
  nb::object detach(nb::handle tensor);
  nb::object narrow(nb::handle tensor, std::size_t dim, std::size_t start, std::size_t length);
  void copy_into(nb::handle tensor, std::size_t dim, std::size_t start, std::size_t length,
                 nb::handle source);

  bool is_tensor(nb::handle object);
  // Whether it is exactly a torch.Tensor or Parameter, which can be read without side effects.
  bool is_plain(nb::handle object);
  bool is_negative(nb::handle tensor);
  bool is_conjugate(nb::handle tensor);
  bool gradients_enabled();

  // torch's current stream of a CUDA device; 0 for others.
  Stream current_stream(Device device);
  // Makes torch give back its cached memory. False if it cannot, such as during a capture.
  bool empty_cache();

  // For tests of releases without DLPack's C exchange API: false reads by Python attributes.
  void use_exchange_api(bool use);

 private:
  TorchBridge();
  nb::object tensor_over(Generation* generation, Address address, std::size_t bytes, Device device);

  nb::object tensor_type_, parameter_type_;
  nb::object set_, detach_, narrow_, copy_, untyped_storage_, is_neg_, is_conj_;
  nb::object current_stream_, cuda_;
  nb::object from_dlpack_, storage_type_, grad_enabled_;
  nb::object private_;  // attributes for storages of ours
  const dlpack::ExchangeApi* available_ = nullptr;
  const dlpack::ExchangeApi* api_ = nullptr;
};

// Calls by vectorcall. Throws python_error.
nb::object call(nb::handle callable, std::initializer_list<PyObject*> arguments);

}  // namespace vtensor::bind
