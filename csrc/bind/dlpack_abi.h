// The part of DLPack's C ABI that is used with torch (DLPack 1.x). Numbers and layouts are from its
// specification, https://dmlc.github.io/dlpack/latest/c_api.html.
#pragma once

#include <cstdint>

#include "driver/driver.h"

namespace vtensor::dlpack {

using vtensor::Device;  // of the same layout

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  friend bool operator==(const DataType&, const DataType&) = default;
};
inline constexpr DataType kUint8{1, 8, 1};
// A value of DataType::code.
inline constexpr std::uint8_t kComplex = 5;

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null if dense
  std::uint64_t byte_offset;
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

// The target of torch.Tensor.__dlpack_c_exchange_api__ (torch 2.10 and later).
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  int (*allocate)(Tensor*, void**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void*, void**);
  int (*object_from_managed)(ManagedTensorVersioned*, void**);  // takes ownership
  int (*tensor_from_object)(void*, Tensor*);  // borrowed: valid until the object changes
  int (*current_stream)(std::int32_t, std::int32_t, void**);
};

}  // namespace vtensor::dlpack
