#include "vmm/budget_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <thread>

#include "base/process.h"
#include "base/system_errors.h"

namespace vtensor {

namespace {

constexpr char kFolder[] = "/dev/shm/";
constexpr std::uint64_t kMagic = 0x7465677564627476;  // "vtbudget"
// The file is locked for the time of a few stores, unless its holder is stopped. Tries are counted,
// and not time: this process, or its machine, may have been stopped too.
constexpr std::chrono::nanoseconds kLockPatience = std::chrono::seconds(1);
constexpr std::chrono::nanoseconds kLockPause = std::chrono::microseconds(100);
constexpr int kWithoutPause = 16;
constexpr int kLockTries = kWithoutPause + static_cast<int>(kLockPatience / kLockPause);

// Bytes of the file that stand for locks, in every layout. Apart, so that the kernel joins none.
constexpr off_t kFileLock = 0;
constexpr off_t kLife = 2;  // and on: one a place

static_assert(BudgetFile::Counter::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

std::string prefix() { return text("vtensor-", geteuid(), "-"); }

off_t life_of(std::size_t place) { return kLife + static_cast<off_t>(place); }

flock lock_of(short type, off_t first, off_t bytes) {
  flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = first;
  lock.l_len = bytes;
  return lock;
}

// Requests are numbered, and the numbers wrap around.
bool is_before(std::uint32_t one, std::uint32_t other) {
  return static_cast<std::int32_t>(one - other) < 0;
}

// All files that are open, for fork(2). Never destroyed: a pool may end while the process does.
std::mutex& all_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}
std::vector<BudgetFile*>& all() {
  static auto& files = *new std::vector<BudgetFile*>;
  return files;
}

}  // namespace

bool BudgetFile::is_name(std::string_view name) {
  constexpr std::string_view kLetters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  return !name.empty() && name.size() <= kLongestName &&
         name.find_first_not_of(kLetters) == std::string_view::npos;
}

std::vector<std::string> BudgetFile::names() {
  std::vector<std::string> names;
  const std::string begin = prefix();
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(kFolder), closedir);
  while (const dirent* entry = folder ? readdir(folder.get()) : nullptr) {
    const std::string_view file = entry->d_name;
    if (file.starts_with(begin) && is_name(file.substr(begin.size())))
      names.emplace_back(file.substr(begin.size()));
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string BudgetFile::path() const { return kFolder + prefix() + name_; }

template <typename Body>
int BudgetFile::attempt(Call call, int injected, Body body) {
  if (meter_.enter(call)) return injected;
  return body() ? 0 : errno;
}

BudgetFile::BudgetFile(CallMeter& meter, std::string name) : meter_(meter), name_(std::move(name)) {
  const std::lock_guard lock(all_mutex());
  all().push_back(this);
}

std::unique_ptr<BudgetFile> BudgetFile::open(CallMeter& meter, const std::string& name, bool make) {
  watch_forks();
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork([] { all_mutex().lock(); }, [] { all_mutex().unlock(); }, close_in_child);
  });
  std::unique_ptr<BudgetFile> file(new BudgetFile(meter, name));
  const std::string path = file->path();
  const int error = file->attempt(Call::open, EMFILE, [&] {
    const std::lock_guard no_fork(all_mutex());
    const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (make ? O_CREAT : 0);
    file->fd_ = ::open(path.c_str(), flags, S_IRUSR | S_IWUSR);
    return file->fd_ >= 0;
  });
  if (error == ENOENT && !make) return nullptr;
  if (error != 0) {
    throw refused("shared budget", Call::open, error, "opening " + path,
                  "raise the limit on descriptors (ulimit -n), or see which users may write there");
  }
  struct stat found{};
  if (fstat(file->fd_, &found) != 0 || !S_ISREG(found.st_mode) || found.st_uid != geteuid()) {
    throw Error("[shared budget] ", path,
                " is no file of this user: remove it, or use another name");
  }
  return file;
}

BudgetFile::~BudgetFile() {
  const std::lock_guard lock(all_mutex());
  std::erase(all(), this);
  if (content_ != nullptr) munmap(content_, sizeof(Content));
  if (fd_ >= 0) close(fd_);
}

// A child's descriptor, as its mapping, would keep our locks when we are dead.
void BudgetFile::close_in_child() {
  for (const BudgetFile* file : all()) {
    if (file->fd_ >= 0) close(file->fd_);
  }
  all().clear();
  all_mutex().unlock();
}

void BudgetFile::begin(std::uint64_t limit) {
  const int error = attempt(Call::fallocate, ENOSPC, [this] {
    int result;
    do {
      result = fallocate(fd_, 0, 0, sizeof(Content));
    } while (result != 0 && errno == EINTR);
    return result == 0;
  });
  if (error != 0) {
    throw refused("shared budget", Call::fallocate, error,
                  text("making ", sizeof(Content), " bytes of ", path()),
                  "free memory in /dev/shm, or raise the limit on files (ulimit -f)");
  }
  map();
  if (content_ == nullptr) return;  // cut again at once: it is not whole
  std::memset(static_cast<void*>(content_), 0, sizeof(Content));
  content_->limit = limit;
  content_->layout = kLayout;
  content_->magic = content_->last_word = kMagic;
}

bool BudgetFile::is_long_enough() const noexcept {
  struct stat found{};
  return fstat(fd_, &found) == 0 && found.st_size >= static_cast<off_t>(sizeof(Content));
}

void BudgetFile::map() {
  if (!is_long_enough()) return;
  const std::lock_guard no_fork(all_mutex());
  int error = attempt(Call::mmap, ENOMEM, [this] {
    void* const at = mmap(nullptr, sizeof(Content), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (at != MAP_FAILED) content_ = static_cast<Content*>(at);
    return at != MAP_FAILED;
  });
  if (error == 0) {
    error = attempt(Call::madvise, ENOMEM,
                    [this] { return madvise(content_, sizeof(Content), MADV_DONTFORK) == 0; });
  }
  if (error != 0) {
    throw refused("shared budget", Call::mmap, error, "mapping " + path(),
                  "raise the limits on mappings (vm.max_map_count) and address space");
  }
}

std::uint32_t BudgetFile::layout() const {
  struct {
    std::uint64_t magic;
    std::uint32_t layout;
  } head{};
  static_assert(offsetof(Content, layout) == offsetof(decltype(head), layout));
  const ssize_t bytes = pread(fd_, &head, sizeof(head), 0);
  return bytes == sizeof(head) && head.magic == kMagic ? head.layout : 0;
}

BudgetFile::Content& BudgetFile::content() const noexcept {
  if (!cut_.load(std::memory_order_acquire) && !is_long_enough()) {
    // In one step for other threads, which may be about to use it.
    void* const at = mmap(content_, sizeof(Content), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    cut_.store(at != MAP_FAILED, std::memory_order_release);
  }
  return *content_;
}

BudgetFile::Content& BudgetFile::require_whole() const {
  struct stat found{};
  const bool removed = fstat(fd_, &found) == 0 && found.st_nlink == 0;
  const bool whole = content_ != nullptr && !cut_.load(std::memory_order_acquire) &&
                     found.st_size >= static_cast<off_t>(sizeof(Content)) &&
                     content_->last_word == kMagic;
  if (whole && !removed) return *content_;
  const std::string was =
      removed ? "removed, so pools that are made now do not see what this one holds: it takes no "
                "more; close the pools that were made before, and make them again"
              : "made shorter by another program, so nothing says what its pools hold: they take "
                "no more; close them all, and make them again";
  throw Error("[shared budget] the file ", path(), " of the shared budget \"", name_, "\" was ",
              was);
}

bool BudgetFile::linked() const {
  struct stat here{}, there{};
  return fstat(fd_, &here) == 0 && stat(path().c_str(), &there) == 0 &&
         here.st_dev == there.st_dev && here.st_ino == there.st_ino;
}

void BudgetFile::unlink() const noexcept { ::unlink(path().c_str()); }

bool BudgetFile::other_holds(off_t first, off_t bytes) const {
  flock lock = lock_of(F_WRLCK, first, bytes);
  return fcntl(fd_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

bool BudgetFile::alive(std::size_t place) const { return other_holds(life_of(place), 1); }

bool BudgetFile::any_alive() const { return other_holds(kLife, 0); }

int BudgetFile::try_lock(off_t byte) noexcept {
  flock lock = lock_of(F_WRLCK, byte, 1);
  return fcntl(fd_, F_OFD_SETLK, &lock) == 0 ? 0 : errno;
}

void BudgetFile::unlock(off_t byte) noexcept {
  flock lock = lock_of(F_UNLCK, byte, 1);
  static_cast<void>(fcntl(fd_, F_OFD_SETLK, &lock));  // of what we hold: nothing to refuse
}

DriverError BudgetFile::lock_refused(int error) const {
  return refused("shared budget", Call::fcntl, error, "locking " + path(),
                 "use a system with locks of open file descriptions on /dev/shm");
}

void BudgetFile::enter(std::size_t place) {
  const int error = meter_.enter(Call::fcntl) ? ENOLCK : try_lock(life_of(place));
  if (error != 0) throw lock_refused(error);
}

void BudgetFile::leave(std::size_t place) noexcept { unlock(life_of(place)); }

std::uint32_t BudgetFile::request() noexcept {
  std::atomic<std::uint32_t>& last = content().last_request;
  const std::uint32_t request = ++last;
  syscall(SYS_futex, &last, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  return request;
}

bool BudgetFile::answered(std::uint32_t request, std::size_t own) const {
  const Content& content = this->content();
  for (std::size_t i = 0; i < kMostPools; ++i) {
    const Place& place = content.places[i];
    if (i != own && place.taken != 0 && is_before(place.answered, request) && alive(i))
      return false;
  }
  return true;
}

void BudgetFile::await_request(std::uint32_t request) const noexcept {
  const timespec second{.tv_sec = 1, .tv_nsec = 0};
  syscall(SYS_futex, &content().last_request, FUTEX_WAIT, request, &second, nullptr, 0);
}

BudgetFile::Lock::Lock(BudgetFile& file, Counted counted) : file_(&file) {
  int error =
      counted == Counted::yes && file.meter_.enter(Call::fcntl) ? ENOLCK : file.try_lock(kFileLock);
  for (int tries = 0; error != 0; ++tries) {
    if (error != EAGAIN && error != EACCES) throw file.lock_refused(error);
    if (tries == kLockTries) {
      throw TimedOut("shared budget", kLockPatience,
                     "another process has locked the shared budget \"" + file.name() +
                         "\" and is stopped: let it go on, or kill it");
    }
    tries < kWithoutPause ? std::this_thread::yield() : std::this_thread::sleep_for(kLockPause);
    error = file.try_lock(kFileLock);
  }
}

BudgetFile::Lock::Lock(BudgetFile& file, std::try_to_lock_t)
    : file_(file.try_lock(kFileLock) == 0 ? &file : nullptr) {}

BudgetFile::Lock::~Lock() {
  if (file_ != nullptr) file_->unlock(kFileLock);
}

}  // namespace vtensor
