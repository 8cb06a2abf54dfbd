// The errors that cross the library's border. Each maps to one Python class of vtensor.errors.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace vtensor {

// Messages read "[operation] what was asked, what there is: what to do".
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
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

// Its pages are away until its pool wakes it.
class Asleep : public Error {
  using Error::Error;
};

class OutOfPages : public Error {
  using Error::Error;
};

// A KV cache has as many requests as it has slots for.
class NoFreeSlot : public Error {
  using Error::Error;
};

// The device has memory, and it is to be left to others.
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
      : Error("[" + operation + "] timed out after " + seconds_text(bound) + ": " + what) {}
};

// A driver call that was refused. The driver has undone what the same operation did before it.
class DriverError : public Error {
 public:
  DriverError(std::string call, long code, std::string name, const std::string& message)
      : Error(message), call(std::move(call)), code(code), name(std::move(name)) {}

  std::string call;  // "mmap", "cuMemMap", ...
  long code;         // errno or CUresult
  std::string name;  // "ENOMEM", "CUDA_ERROR_INVALID_VALUE", ...
};

// The device has no memory left for a new page, or to map one, whatever the budget says.
class DeviceOutOfMemory : public DriverError {
 public:
  using DriverError::DriverError;
  explicit DeviceOutOfMemory(const DriverError& cause) : DriverError(cause) {}
};

inline bool is_out_of_memory(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const DeviceOutOfMemory&) {
    return true;
  } catch (...) {
    return false;
  }
}

// A call was refused and so was its undoing. `stuck` holds the indices, within the batch, of the
// pages whose mapping is no longer known: the caller quarantines them (I8).
class UndoFailed : public DriverError {
 public:
  UndoFailed(const DriverError& cause, std::vector<std::size_t> stuck)
      : DriverError(cause), stuck(std::move(stuck)) {}

  std::vector<std::size_t> stuck;
};

}  // namespace vtensor
