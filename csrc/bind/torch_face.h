// What the bindings use of torch, through Python and DLPack: no PyTorch header, so one build serves
// every release.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "bind/dlpack_abi.h"
#include "driver/driver.h"
#include "policy/generation.h"

namespace vtensor::bind {

namespace nb = nanobind;

// What a torch tensor is at this moment.
struct TensorFacts {
  void* data = nullptr;
  dlpack::Device device{};
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
};

// torch's functions, looked up once.
class TorchFace {
 public:
  static TorchFace& get();

  // What DLPack's C exchange API says of a tensor, good while that is not changed; false where it
  // is no tensor, or one that DLPack cannot describe.
  bool glance(nb::handle object, dlpack::Tensor& seen);
  // False where `object` is no strided tensor. Conjugate and negative bits are not looked at.
  bool read(nb::handle tensor, TensorFacts& facts);

  // A storage over `generation`, which ends with it. `address` and `bytes` are the extent. It
  // refuses to be shared with other processes.
  nb::object storage_over(Generation* generation, Address address, std::size_t bytes,
                          Device device);
  nb::object empty_storage(nb::handle device);
  // The one under `tensor`, whose Python object all tensors over it share.
  nb::object storage(nb::handle tensor);

  void set(nb::handle tensor, nb::handle storage, std::size_t offset, nb::handle sizes,
           nb::handle strides);
  nb::object detach(nb::handle tensor);
  nb::object narrow(nb::handle tensor, std::size_t dim, std::size_t start, std::size_t length);
  void copy_into(nb::handle tensor, std::size_t dim, std::size_t start, std::size_t length,
                 nb::handle source);

  bool is_tensor(nb::handle object);
  // Exactly torch.Tensor or Parameter: reading it has no side effects.
  bool is_plain(nb::handle object);
  bool is_negative(nb::handle tensor);
  bool is_conjugate(nb::handle tensor);
  bool gradients_enabled();

  // torch's current stream of a CUDA device; 0 for others.
  Stream current_stream(Device device);
  // Has torch give back the memory that it keeps. False where it cannot, as while a graph is
  // captured.
  bool empty_cache();

  // For tests of releases without DLPack's C exchange API: reads by Python attributes instead.
  void use_exchange_api(bool use);

 private:
  TorchFace();
  nb::object tensor_over(Generation* generation, Address address, std::size_t bytes, Device device);

  nb::object tensor_type_, parameter_type_;
  nb::object set_, detach_, narrow_, copy_, untyped_storage_, is_neg_, is_conj_;
  nb::object current_stream_, cuda_;
  nb::object from_dlpack_, storage_type_, grad_enabled_;
  nb::object private_;  // what a storage of ours has set on it
  const dlpack::ExchangeApi* available_ = nullptr;
  const dlpack::ExchangeApi* api_ = nullptr;
};

// vectorcall that throws python_error
nb::object call(nb::handle callable, std::initializer_list<PyObject*> arguments);

}  // namespace vtensor::bind
