// The errors that the library throws. bind/module.cpp maps each to a class of vtensor.errors.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace vtensor {

template <typename Part>
concept IsText = std::is_convertible_v<const Part&, std::string_view>;

// A part of a message: text, or a number.
template <typename Part>
concept MessagePart = IsText<Part> || std::is_arithmetic_v<Part> || std::is_enum_v<Part>;

// Joins the parts of a message: text("need ", 3, " pages").
template <MessagePart... Parts>
std::string text(const Parts&... parts) {
  std::string joined;
  const auto add = [&joined]<typename Part>(const Part& part) {
    if constexpr (IsText<Part>) {
      joined += std::string_view(part);
    } else {
      joined += std::to_string(part);
    }
  };
  (add(parts), ...);
  return joined;
}

// A message reads "[operation] what was asked, what there is: what to do"; `parts` are joined.
class Error : public std::runtime_error {
 public:
  template <MessagePart... Parts>
  explicit Error(const Parts&... parts) : runtime_error(text(parts...)) {}
};

class InvalidArgument : public Error {
  using Error::Error;
};

class CapacityExceeded : public Error {
  using Error::Error;
};

class Closed : public Error {
  using Error::Error;
};

// A tensor or cache whose memory is away until its pool wakes it.
class Asleep : public Error {
  using Error::Error;
};

class OutOfPages : public Error {
  using Error::Error;
};

// All slots of a KV cache have requests.
class NoFreeSlot : public Error {
  using Error::Error;
};

// The device has the memory, but the pool's reserve leaves it to other users of the device.
class ReserveReached : public OutOfPages {
  using OutOfPages::OutOfPages;
};

// "60 s", "0.25 s".
inline std::string seconds_text(std::chrono::nanoseconds time) {
  std::string text = std::to_string(std::chrono::duration<double>(time).count());
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

// A wait that reached its bound (I12).
class TimedOut : public Error {
 public:
  using Error::Error;
  TimedOut(const std::string& operation, std::chrono::nanoseconds bound, const std::string& what)
      : Error("[", operation, "] timed out after ", seconds_text(bound), ": ", what) {}
};

// A refused driver call. Every operation but Driver::map has undone its earlier calls.
class DriverError : public Error {
 public:
  template <MessagePart... Parts>
  DriverError(std::string call, long code, std::string name, const Parts&... message)
      : Error(message...), call(std::move(call)), code(code), name(std::move(name)) {}

  std::string call;  // "mmap", "cuMemMap", ...
  long code;         // errno or CUresult
  std::string name;  // "ENOMEM", "CUDA_ERROR_INVALID_VALUE", ...
};

// The device has no memory left to make or map a page, whatever the budget says.
class DeviceOutOfMemory : public DriverError {
 public:
  using DriverError::DriverError;
  explicit DeviceOutOfMemory(const DriverError& cause) : DriverError(cause) {}
};

// A remap was refused, and so was putting the old pages back: nothing says what is mapped there.
class UndoFailed : public DriverError {
 public:
  explicit UndoFailed(const DriverError& cause) : DriverError(cause) {}
};

}  // namespace vtensor
