// A file of one process or of several: its descriptor, its mapping and locks of its bytes, which
// are those of open file descriptions (F_OFD_SETLK). A forked child has neither the descriptor nor
// the mapping, either of which would keep the locks when this process is dead.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/calls.h"
#include "base/descriptor.h"

namespace vtensor {

// Which file it is, whatever its descriptor.
struct FileId {
  std::uint64_t device = 0, inode = 0;
  friend bool operator==(const FileId&, const FileId&) = default;
};
// All zeros if the descriptor is of no file.
FileId id_of(int descriptor);

class SharedFile {
 public:
  SharedFile();
  ~SharedFile();
  SharedFile& operator=(SharedFile&&) = delete;

  // open, make, make_socket and map return false, with the reason in errno, if the system refuses.

  bool open(const std::string& path, int flags);
  // Makes a file without a name, of `bytes` zeros, whose size never changes.
  bool make(const char* name, std::size_t bytes);
  // Makes one end of a socket of packets; the other one is `other`.
  bool make_socket(Descriptor& other);
  // Owns `descriptor` from now on.
  void take(Descriptor descriptor);
  // Maps the first `bytes`, of which the caller may write the first `writable`.
  bool map(std::size_t bytes, std::size_t writable);

  int descriptor() const { return descriptor_.get(); }
  std::byte* at() const { return at_; }
  std::size_t bytes() const { return bytes_; }  // mapped

  // 0, or what the system refuses it with; EAGAIN if another open file has it. `meter` counts the
  // call, and may be null.
  int try_lock(CallMeter* meter, off_t byte) const;
  void unlock(off_t byte) const noexcept;
  // Whether another open file has one of these locks. True if that cannot be seen.
  bool is_locked(off_t first, off_t bytes) const;

 private:
  static void leave_in_child();
  static const int refused;  // handlers of fork(2): 0, or an error

  Descriptor descriptor_{-1};
  std::byte* at_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace vtensor
