// A file that processes may share: its descriptor, its mapping, and locks of its bytes, which
// belong to open file descriptions (F_OFD_SETLK). A forked child gets neither the descriptor nor
// the mapping, because either would keep the locks after this process has died.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/calls.h"
#include "base/descriptor.h"

namespace vtensor {

// Identifies a file, whatever its descriptor.
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
  // Makes a socket of packets: this object is one end, `other` the other.
  bool make_socket(Descriptor& other);
  // Takes over `descriptor`.
  void take(Descriptor descriptor);
  // Maps the first `bytes`, of which the caller may write the first `writable`.
  bool map(std::size_t bytes, std::size_t writable);

  int descriptor() const { return descriptor_.get(); }
  std::byte* at() const { return at_; }
  std::size_t bytes() const { return bytes_; }  // mapped

  // Tries to lock a byte. Returns 0 or an errno: EAGAIN if another open file has the lock. `meter`
  // counts the call, and may be null.
  int try_lock(CallMeter* meter, off_t byte) const;
  void unlock(off_t byte) const noexcept;
  // Whether another open file locks one of `bytes` bytes from `first` on. True if that is unknown.
  bool is_locked(off_t first, off_t bytes) const;

 private:
  static void leave_in_child();
  static const int refused;  // handlers of fork(2): 0, or an error

  Descriptor descriptor_{-1};
  std::byte* at_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace vtensor
