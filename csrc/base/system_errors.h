// System calls, and the errors that describe refusals.
#pragma once

#include <fcntl.h>

#include <cerrno>
#include <string>
#include <utility>

#include "base/calls.h"
#include "base/descriptor.h"
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

// Counts and makes a system call by `body`, which returns whether the call succeeded and leaves the
// reason in errno if not. A failure injected by a test has the error `injected`. Throws `refused`.
template <typename Body>
void make_call(CallMeter& meter, const char* operation, Call call, int injected,
               const std::string& what, const std::string& remedy, Body body) {
  const int error = meter.enter(call) ? injected : (body() ? 0 : errno);
  if (error != 0) throw refused(operation, call, error, what, remedy);
}

// Opens the memfd of `descriptor` again, as an open file of its own for another process. `what`
// names the memfd in messages.
inline Descriptor open_anew(CallMeter& meter, const char* operation, int descriptor, int flags,
                            const std::string& what) {
  Descriptor opened(-1);
  make_call(meter, operation, Call::open, EMFILE, text("opening ", what, " anew"),
            "mount /proc, and raise the limit on descriptors (ulimit -n)", [&] {
              const std::string path = text("/proc/self/fd/", descriptor);
              opened = Descriptor(open(path.c_str(), flags | O_CLOEXEC));
              return opened.get() >= 0;
            });
  return opened;
}

}  // namespace vtensor
