// What the operating system refused, in words.
#pragma once

#include <cerrno>
#include <string>
#include <utility>

#include "base/calls.h"
#include "base/errors.h"

namespace vtensor {

inline std::string errno_name(int error) {
  static constexpr std::pair<int, const char*> kNames[] = {
      {EACCES, "EACCES"}, {EAGAIN, "EAGAIN"}, {EBADF, "EBADF"},   {EFAULT, "EFAULT"},
      {EFBIG, "EFBIG"},   {EINTR, "EINTR"},   {EINVAL, "EINVAL"}, {ELOOP, "ELOOP"},
      {EMFILE, "EMFILE"}, {ENFILE, "ENFILE"}, {ENODEV, "ENODEV"}, {ENOLCK, "ENOLCK"},
      {ENOMEM, "ENOMEM"}, {ENOSPC, "ENOSPC"}, {ENOSYS, "ENOSYS"}, {EPERM, "EPERM"},
  };
  for (const auto& [number, name] : kNames) {
    if (number == error) return name;
  }
  return text("errno ", error);
}

// "[operation] what was refused with ENOMEM: remedy".
inline DriverError refused(const char* operation, Call call, int error, const std::string& what,
                           const std::string& remedy) {
  const std::string name = errno_name(error);
  return {std::string(name_of(call)), error, name,
          text("[", operation, "] ", what, " was refused with ", name, ": ", remedy)};
}

}  // namespace vtensor
