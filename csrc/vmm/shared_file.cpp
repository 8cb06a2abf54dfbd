#include "vmm/shared_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <mutex>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/process.h"

namespace vtensor {

namespace {

// Never destroyed: a pool may end while the process does.
std::mutex& registry_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}
std::vector<SharedFile*>& registry() {
  static auto& files = *new std::vector<SharedFile*>;
  return files;
}
void lock_registry() { registry_mutex().lock(); }
void unlock_registry() { registry_mutex().unlock(); }

flock lock_of(short type, off_t first, off_t bytes) {
  flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = first;
  lock.l_len = bytes;
  return lock;
}

}  // namespace

FileId id_of(int descriptor) {
  struct stat found{};
  return fstat(descriptor, &found) == 0 ? FileId{found.st_dev, found.st_ino} : FileId{};
}

SharedFile::SharedFile() {
  watch_forks();
  const std::lock_guard no_fork(registry_mutex());
  registry().push_back(this);
}

SharedFile::~SharedFile() {
  const std::lock_guard no_fork(registry_mutex());
  std::erase(registry(), this);
  if (at_ != nullptr) munmap(at_, bytes_);
  descriptor_ = Descriptor(-1);  // with the mutex: no fork between munmap and close
}

[[maybe_unused]] const int SharedFile::refused =
    pthread_atfork(lock_registry, unlock_registry, leave_in_child);

void SharedFile::leave_in_child() {
  for (SharedFile* file : registry()) {
    file->descriptor_ = Descriptor(-1);
    file->at_ = nullptr;
  }
  unlock_registry();
}

bool SharedFile::open(const std::string& path, int flags) {
  const std::lock_guard no_fork(registry_mutex());
  descriptor_ = Descriptor(::open(path.c_str(), flags | O_CLOEXEC, S_IRUSR | S_IWUSR));
  return descriptor() >= 0;
}

bool SharedFile::make(const char* name, std::size_t bytes) {
  const std::lock_guard no_fork(registry_mutex());
  descriptor_ = Descriptor(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  return descriptor() >= 0 && ftruncate(descriptor(), static_cast<off_t>(bytes)) == 0 &&
         fcntl(descriptor(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0;
}

bool SharedFile::make_socket(Descriptor& other) {
  const std::lock_guard no_fork(registry_mutex());
  std::array<int, 2> ends{-1, -1};
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) return false;
  descriptor_ = Descriptor(ends[0]);
  other = Descriptor(ends[1]);
  return true;
}

void SharedFile::take(Descriptor descriptor) {
  const std::lock_guard no_fork(registry_mutex());
  descriptor_ = std::move(descriptor);
}

bool SharedFile::map(std::size_t bytes, std::size_t writable) {
  const std::lock_guard no_fork(registry_mutex());
  void* const at = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor(), 0);
  if (at == MAP_FAILED) return false;
  at_ = static_cast<std::byte*>(at);
  bytes_ = bytes;
  return mprotect(at, writable, PROT_READ | PROT_WRITE) == 0 &&
         madvise(at, bytes, MADV_DONTFORK) == 0;
}

int SharedFile::try_lock(CallMeter* meter, off_t byte) const {
  if (meter != nullptr && meter->enter(Call::fcntl)) return ENOLCK;
  flock lock = lock_of(F_WRLCK, byte, 1);
  return fcntl(descriptor(), F_OFD_SETLK, &lock) == 0 ? 0 : errno;
}

void SharedFile::unlock(off_t byte) const noexcept {
  flock lock = lock_of(F_UNLCK, byte, 1);
  static_cast<void>(fcntl(descriptor(), F_OFD_SETLK, &lock));  // cannot fail for a held lock
}

bool SharedFile::is_locked(off_t first, off_t bytes) const {
  flock lock = lock_of(F_WRLCK, first, bytes);
  return fcntl(descriptor(), F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace vtensor
