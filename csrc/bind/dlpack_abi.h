// The part of DLPack's C ABI that crosses to torch (DLPack 1.x; numbers and layouts as its
// specification gives them, https://dmlc.github.io/dlpack/latest/c_api.html).
#pragma once

#include <cstdint>

namespace vtensor::dlpack {

struct Device {
  std::int32_t type;
  std::int32_t index;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
inline constexpr DataType kUint8{1, 8, 1};
// Of DataType::code.
inline constexpr std::uint8_t kInt = 0;
// Of Device::type.
inline constexpr std::int32_t kCpu = 1;

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null where dense
  std::uint64_t byte_offset;
};

struct ManagedTensor {  // "dltensor" capsules
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

// Behind torch.Tensor.__dlpack_c_exchange_api__ (torch 2.10 and later).
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  int (*allocate)(Tensor*, void**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void*, void**);
  int (*object_from_managed)(ManagedTensorVersioned*, void**);  // takes it over
  int (*tensor_from_object)(void*, Tensor*);  // borrowed: good while the object is not changed
  int (*current_stream)(std::int32_t, std::int32_t, void**);
};

}  // namespace vtensor::dlpack
