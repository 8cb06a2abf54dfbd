#include "vmm/shared_budget.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "base/process.h"
#include "base/system_errors.h"

namespace vtensor {

using std::chrono::steady_clock;

namespace {

constexpr char kFolder[] = "/dev/shm/";
constexpr std::uint64_t kMagic = 0x7465677564627476;  // "vtbudget"
constexpr std::uint32_t kLayout = 1;
constexpr std::size_t kLongestName = 64;
// The file is locked for the time of a few stores, unless its holder is stopped. Looks are counted,
// and not time: this process, or its machine, may have been stopped too.
constexpr std::chrono::nanoseconds kLockPatience = std::chrono::seconds(1);
constexpr std::chrono::nanoseconds kLockLook = std::chrono::microseconds(100);
constexpr int kSoon = 16;
constexpr int kLockLooks = kSoon + static_cast<int>(kLockPatience / kLockLook);
constexpr std::chrono::nanoseconds kLookForDead = std::chrono::milliseconds(100);
constexpr std::chrono::nanoseconds kLook = std::chrono::milliseconds(1);

// Bytes of the file that stand for locks, in every layout. Apart, so that the kernel joins none.
constexpr off_t kFileLock = 0;
constexpr off_t kLife = 2;  // and on: one a place

using Counter = std::atomic<std::uint64_t>;
static_assert(Counter::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

std::string prefix() { return "vtensor-" + std::to_string(geteuid()) + "-"; }

std::string path_of(const std::string& name) { return kFolder + prefix() + name; }

bool may_be_name(std::string_view name) {
  constexpr std::string_view kLetters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  return !name.empty() && name.size() <= kLongestName &&
         name.find_first_not_of(kLetters) == std::string_view::npos;
}

std::string quoted(const std::string& name) { return "\"" + name + "\""; }

flock range(short type, off_t start, off_t length) {
  flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = start;
  lock.l_len = length;
  return lock;
}

std::string command_of_process() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string command{std::istreambuf_iterator<char>(file), {}};
  std::replace(command.begin(), command.end(), '\0', ' ');
  command.erase(command.find_last_not_of(' ') + 1);
  return command;
}

// Requests are numbered, and the numbers wrap around.
bool is_before(std::uint32_t one, std::uint32_t other) {
  return static_cast<std::int32_t>(one - other) < 0;
}

}  // namespace

struct alignas(64) SharedBudget::Place {
  std::atomic<std::uint32_t> taken;  // stored last
  std::atomic<std::uint32_t> answered;
  Counter held, cached, spare, wanted;
  std::int64_t process;
  std::int32_t device_type, device_index;
  std::array<char, 128> command;  // ends with a zero
};

// What the file holds. It never becomes shorter, so looking at it is safe whatever others do.
struct SharedBudget::File {
  std::uint64_t magic;
  std::uint32_t layout;
  std::atomic<std::uint32_t> last_request;
  std::uint64_t limit;
  std::array<Place, kMostPools> places;
};

// The file, opened once: its locks and its mapping are this object's own, and no child's.
class SharedBudget::Opened {
 public:
  // Null if the file is gone, or is not there and not to be made.
  static std::unique_ptr<Opened> open(CallMeter& meter, const std::string& name, bool make) {
    watch_forks();
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(lock_all, unlock_all, close_in_child); });
    const std::string path = path_of(name);
    std::unique_ptr<Opened> opened(new Opened(meter, name));
    int error = meter.enter(Call::open) ? EMFILE : 0;
    if (error == 0) {
      const std::lock_guard no_fork(all_mutex());
      const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (make ? O_CREAT : 0);
      opened->fd_ = ::open(path.c_str(), flags, S_IRUSR | S_IWUSR);
      if (opened->fd_ < 0) error = errno;
    }
    if (error == ENOENT && !make) return nullptr;
    if (error != 0) {
      throw refused("shared budget", Call::open, error, "opening " + path,
                    "raise the limit on descriptors (ulimit -n), or see who may write there");
    }
    struct stat found{};
    if (fstat(opened->fd_, &found) != 0 || !S_ISREG(found.st_mode) || found.st_uid != geteuid())
      throw Error("[shared budget] " + path +
                  " is no file of this user: remove it, or use another name");
    return opened;
  }

  ~Opened() {
    if (in_forked_child.load(std::memory_order_relaxed)) return;  // both are gone there
    const std::lock_guard lock(all_mutex());
    std::erase(all(), this);
    if (file_ != nullptr) munmap(file_, sizeof(File));
    if (fd_ >= 0) close(fd_);
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

  const std::string& name() const { return name_; }
  // Requires: it is mapped.
  File& file() const { return *file_; }

  // Makes the file long enough, with its memory, and maps it. Requires: locked.
  void provide() {
    int error = meter_.enter(Call::fallocate) ? ENOSPC : 0;
    while (error == 0 && fallocate(fd_, 0, 0, sizeof(File)) != 0) {
      if (errno != EINTR) error = errno;
    }
    if (error != 0) {
      throw refused("shared budget", Call::fallocate, error,
                    "making " + std::to_string(sizeof(File)) + " bytes of " + path_of(name_),
                    "free memory in /dev/shm, or raise the limit on files (ulimit -f)");
    }
    map();
  }
  // False if the file is too short to be whole.
  bool map() {
    struct stat found{};
    if (fstat(fd_, &found) != 0 || found.st_size < static_cast<off_t>(sizeof(File))) return false;
    int error = meter_.enter(Call::mmap) ? ENOMEM : 0;
    void* at = nullptr;
    const std::lock_guard no_fork(all_mutex());
    if (error == 0) {
      at = mmap(nullptr, sizeof(File), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
      if (at == MAP_FAILED) error = errno;
    }
    if (error == 0) {
      file_ = static_cast<File*>(at);
      // A child's mapping would keep our locks alive when we are dead.
      if (meter_.enter(Call::madvise)) {
        error = ENOMEM;
      } else if (madvise(at, sizeof(File), MADV_DONTFORK) != 0) {
        error = errno;
      }
    }
    if (error != 0) {
      throw refused("shared budget", Call::mmap, error, "mapping " + path_of(name_),
                    "raise the limits on mappings (vm.max_map_count) and address space");
    }
    return true;
  }

  // 0 if it is none of ours.
  std::uint32_t layout() const {
    return file_ != nullptr && file_->magic == kMagic ? file_->layout : 0;
  }

  // Whether it still has its name.
  bool linked() const {
    struct stat here{}, there{};
    return fstat(fd_, &here) == 0 && stat(path_of(name_).c_str(), &there) == 0 &&
           here.st_dev == there.st_dev && here.st_ino == there.st_ino;
  }
  // Whether it has none any more: whoever comes by its name makes another.
  bool removed() const {
    struct stat here{};
    return fstat(fd_, &here) == 0 && here.st_nlink == 0;
  }
  void unlink() const noexcept { ::unlink(path_of(name_).c_str()); }

  // Whether any other has a sign of life in the place, or in any. If that cannot be seen, it has.
  bool alive(std::size_t place) const {
    return other_holds(range(F_WRLCK, kLife + static_cast<off_t>(place), 1));
  }
  bool anyone_alive() const { return other_holds(range(F_WRLCK, kLife, 0)); }

  // Asks the other pools, whose listeners wait for it. Returns the number of this request.
  std::uint32_t request() noexcept {
    const std::uint32_t request = ++file_->last_request;
    syscall(SYS_futex, &file_->last_request, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    return request;
  }
  // Whether all others have answered it, or died.
  bool answered(std::uint32_t request, std::size_t own = kMostPools) const {
    for (std::size_t i = 0; i < kMostPools; ++i) {
      const Place& place = file_->places[i];
      if (i != own && place.taken != 0 && is_before(place.answered, request) && alive(i))
        return false;
    }
    return true;
  }

  // 0, or what the system refuses it with; EAGAIN if another holds it.
  int try_lock(off_t byte) {
    flock lock = range(F_WRLCK, byte, 1);
    return fcntl(fd_, F_OFD_SETLK, &lock) == 0 ? 0 : errno;
  }
  // The same, counted, and refused in tests.
  int ask_lock(off_t byte) { return meter_.enter(Call::fcntl) ? ENOLCK : try_lock(byte); }
  void unlock(off_t byte) noexcept {
    flock lock = range(F_UNLCK, byte, 1);
    static_cast<void>(fcntl(fd_, F_OFD_SETLK, &lock));  // of what we hold: nothing to refuse
  }
  DriverError lock_refused(int error) const {
    return refused("shared budget", Call::fcntl, error, "locking " + path_of(name_),
                   "use a system with locks of open file descriptions on /dev/shm");
  }

 private:
  Opened(CallMeter& meter, std::string name) : meter_(meter), name_(std::move(name)) {
    const std::lock_guard lock(all_mutex());
    all().push_back(this);
  }

  bool other_holds(flock lock) const {
    return fcntl(fd_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
  }

  // Never destroyed: a pool may end while the process does.
  static std::mutex& all_mutex() {
    static auto& mutex = *new std::mutex;
    return mutex;
  }
  static std::vector<Opened*>& all() {
    static auto& opened = *new std::vector<Opened*>;
    return opened;
  }
  static void lock_all() { all_mutex().lock(); }
  static void unlock_all() { all_mutex().unlock(); }
  // A child's descriptor too would keep our locks alive.
  static void close_in_child() {
    for (const Opened* opened : all()) {
      if (opened->fd_ >= 0) close(opened->fd_);
    }
    all().clear();
    all_mutex().unlock();
  }

  CallMeter& meter_;
  const std::string name_;
  int fd_ = -1;
  File* file_ = nullptr;
};

// The file's lock.
class SharedBudget::Locked {
 public:
  enum class Counted : std::uint8_t { yes, no };
  explicit Locked(Opened& opened, Counted counted = Counted::yes) : opened_(&opened) {
    for (int tries = 0;; ++tries) {
      const int error = tries == 0 && counted == Counted::yes ? opened.ask_lock(kFileLock)
                                                              : opened.try_lock(kFileLock);
      if (error == 0) return;
      if (error != EAGAIN && error != EACCES) throw opened.lock_refused(error);
      if (tries == kLockLooks) {
        throw TimedOut("shared budget", kLockPatience,
                       "another process has locked the shared budget " + quoted(opened.name()) +
                           " and is stopped: let it go on, or kill it");
      }
      tries < kSoon ? std::this_thread::yield() : std::this_thread::sleep_for(kLockLook);
    }
  }
  // Without a wait: false if another has it.
  Locked(Opened& opened, std::try_to_lock_t)
      : opened_(opened.try_lock(kFileLock) == 0 ? &opened : nullptr) {}
  ~Locked() {
    if (opened_ != nullptr) opened_->unlock(kFileLock);
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  explicit operator bool() const { return opened_ != nullptr; }

 private:
  Opened* opened_;
};

std::unique_ptr<SharedBudget> SharedBudget::join(CallMeter& meter, const std::string& name,
                                                 std::uint64_t limit, Device device) {
  refuse_in_forked_child("Pool");
  if (!may_be_name(name)) {
    throw InvalidArgument("[Pool] " + quoted(name) + " cannot name a shared budget: give 1 to " +
                          std::to_string(kLongestName) +
                          " letters, digits, dots, dashes and underscores");
  }
  for (;;) {
    std::unique_ptr<Opened> opened = Opened::open(meter, name, /*make=*/true);
    const Locked locked(*opened);
    if (!opened->linked()) continue;  // its last pool has left meanwhile
    try {
      const std::size_t place = take_place(*opened, limit, device);
      return std::unique_ptr<SharedBudget>(new SharedBudget(name, std::move(opened), place));
    } catch (...) {
      if (!opened->anyone_alive()) opened->unlink();
      throw;
    }
  }
}

// Requires: locked.
std::size_t SharedBudget::take_place(Opened& opened, std::uint64_t limit, Device device) {
  const std::string& name = opened.name();
  if (!opened.anyone_alive()) {
    opened.provide();
    File& file = opened.file();
    std::memset(static_cast<void*>(&file), 0, sizeof file);
    file.limit = limit;
    file.layout = kLayout;
    file.magic = kMagic;
  } else if (!opened.map() || opened.layout() != kLayout) {
    throw Error("[Pool] the shared budget " + quoted(name) +
                " is kept by another version of vtensor, in layout " +
                std::to_string(opened.layout()) + " where this one has " + std::to_string(kLayout) +
                ": use one version, or another name");
  }
  File& file = opened.file();
  if (file.limit != limit) {
    throw InvalidArgument("[Pool] a budget of " + std::to_string(limit) +
                          " bytes was asked for, the shared budget " + quoted(name) + " has " +
                          std::to_string(file.limit) +
                          ": give all its pools one budget, or use another name");
  }
  std::size_t place = 0;
  while (place < kMostPools && opened.alive(place)) ++place;
  if (place == kMostPools) {
    throw Error("[Pool] the shared budget " + quoted(name) + " has " + std::to_string(kMostPools) +
                " pools, and room for no more: close some, or use another name");
  }
  if (const int error = opened.ask_lock(kLife + static_cast<off_t>(place)); error != 0)
    throw opened.lock_refused(error);
  Place& own = file.places[place];
  own.taken = 0;
  own.held = own.cached = own.spare = own.wanted = 0;
  own.answered = file.last_request.load();
  own.process = getpid();
  own.device_type = device.type;
  own.device_index = device.index;
  own.command.fill(0);
  const std::string command = command_of_process();
  command.copy(own.command.data(), own.command.size() - 1);
  own.taken = 1;
  return place;
}

SharedBudget::SharedBudget(std::string name, std::unique_ptr<Opened> opened, std::size_t place)
    : name_(std::move(name)), opened_(std::move(opened)), place_(place) {}

SharedBudget::~SharedBudget() {
  if (in_forked_child.load(std::memory_order_relaxed)) return;
  own().held = own().wanted = 0;
  own().taken = 0;
  try {
    const Locked locked(*opened_, Locked::Counted::no);   // the meter may have ended
    opened_->unlock(kLife + static_cast<off_t>(place_));  // so that of two that leave one is last
    if (!opened_->anyone_alive() && opened_->linked()) opened_->unlink();
  } catch (...) {
    // The file stays, and the next pool of its name finds no living pool in it.
  }
}

SharedBudget::Place& SharedBudget::own() const { return opened_->file().places[place_]; }

template <typename Sum>
std::uint64_t SharedBudget::sum_elsewhere(Sum sum) const {
  std::uint64_t bytes = 0;
  const auto& places = opened_->file().places;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (i != place_ && places[i].taken != 0) bytes += sum(places[i], i);
  }
  return bytes;
}

std::uint64_t SharedBudget::limit() const { return opened_->file().limit; }

std::uint64_t SharedBudget::held() const { return own().held; }

std::uint64_t SharedBudget::held_elsewhere() const {
  return sum_elsewhere([](const Place& place, std::size_t) { return place.held.load(); });
}

std::uint64_t SharedBudget::spared_elsewhere() const {
  return sum_elsewhere([](const Place& place, std::size_t) {
    return std::min(place.held.load(), place.cached.load() + place.spare.load());
  });
}

std::uint64_t SharedBudget::wanted_elsewhere() const {
  return sum_elsewhere([this](const Place& place, std::size_t i) {
    const std::uint64_t wanted = place.wanted;
    return wanted != 0 && opened_->alive(i) ? wanted : 0;
  });
}

void SharedBudget::free_dead_places() {
  if (const auto now = steady_clock::now(); now >= look_for_dead_at_) {
    look_for_dead_at_ = now + kLookForDead;
    if (const Locked locked(*opened_, std::try_to_lock); locked) count_out_the_dead();
  }
}

std::uint64_t SharedBudget::room() {
  free_dead_places();
  const std::uint64_t all = held() + held_elsewhere();
  return all < limit() ? limit() - all : 0;
}

// Requires: locked, so that no pool is about to take a place.
bool SharedBudget::count_out_the_dead() {
  bool any = false;
  auto& places = opened_->file().places;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (i == place_ || places[i].taken == 0 || opened_->alive(i)) continue;
    places[i].held = places[i].wanted = 0;
    places[i].taken = 0;
    any = true;
  }
  return any;
}

bool SharedBudget::charge(std::uint64_t bytes) {
  const Locked locked(*opened_);
  if (opened_->removed()) {
    throw Error("[shared budget] the file " + path_of(name_) + " of the shared budget " +
                quoted(name_) +
                " was removed, so pools that are made now do not see what this one holds: it takes "
                "no more; close the pools that were made before, and make them again");
  }
  const auto fits = [&] {
    const std::uint64_t all = held() + held_elsewhere();
    return all <= limit() && bytes <= limit() - all;
  };
  if (!fits() && !(count_out_the_dead() && fits())) return false;
  own().held += bytes;
  return true;
}

void SharedBudget::charge_anyway(std::uint64_t bytes) noexcept { own().held += bytes; }

void SharedBudget::give_back(std::uint64_t bytes) noexcept { own().held -= bytes; }

void SharedBudget::report(std::uint64_t cached, std::uint64_t spare) noexcept {
  own().cached = cached;
  own().spare = spare;
}

void SharedBudget::want(std::int64_t bytes) noexcept {
  own().wanted += static_cast<std::uint64_t>(bytes);
}

bool SharedBudget::wants() const noexcept { return own().wanted != 0; }

std::uint64_t SharedBudget::missing_elsewhere() const {
  const std::uint64_t wanted = wanted_elsewhere();
  if (wanted == 0) return 0;
  const std::uint64_t all = held() + held_elsewhere();
  const std::uint64_t room = all < limit() ? limit() - all : 0;
  return wanted > room ? wanted - room : 0;
}

std::uint32_t SharedBudget::request() noexcept { return opened_->request(); }

bool SharedBudget::answered(std::uint32_t request) const {
  return opened_->answered(request, place_);
}

std::uint32_t SharedBudget::last_request() const noexcept { return opened_->file().last_request; }

bool SharedBudget::owes_answer() const noexcept { return own().answered != last_request(); }

void SharedBudget::answer(std::uint32_t request) noexcept { own().answered = request; }

void SharedBudget::await_request(std::uint32_t request) const noexcept {
  syscall(SYS_futex, &opened_->file().last_request, FUTEX_WAIT, request, nullptr, nullptr, 0);
}

SharedBudget::Surveys SharedBudget::survey(std::chrono::nanoseconds patience) {
  refuse_in_forked_child("shared budgets");
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(kFolder), closedir);
  while (const dirent* entry = folder ? readdir(folder.get()) : nullptr) {
    const std::string_view file = entry->d_name;
    const std::string begin = prefix();
    if (file.starts_with(begin) && may_be_name(file.substr(begin.size())))
      names.emplace_back(file.substr(begin.size()));
  }
  std::sort(names.begin(), names.end());

  CallMeter meter;
  const auto until = steady_clock::now() + patience;
  Surveys surveys;
  std::vector<std::unique_ptr<Opened>> all;
  for (const std::string& name : names) {
    try {
      std::unique_ptr<Opened> opened = Opened::open(meter, name, /*make=*/false);
      if (!opened || !opened->anyone_alive()) continue;
      {
        const Locked locked(*opened);  // no process begins it meanwhile
        if (!opened->anyone_alive() || !opened->map() || opened->layout() != kLayout) continue;
      }
      all.push_back(std::move(opened));
    } catch (const Error& error) {
      surveys.skipped.emplace_back(error.what());
    }
  }
  std::vector<std::uint32_t> requests;
  for (const std::unique_ptr<Opened>& opened : all) requests.push_back(opened->request());
  for (std::size_t n = 0; n < all.size(); ++n) {
    Opened& opened = *all[n];
    while (!opened.answered(requests[n]) && steady_clock::now() < until)
      std::this_thread::sleep_for(kLook);
    try {
      const Locked locked(opened);
      Survey survey{opened.name(), opened.file().limit, {}};
      for (std::size_t i = 0; i < kMostPools; ++i) {
        const Place& place = opened.file().places[i];
        if (place.taken == 0 || !opened.alive(i)) continue;
        survey.holders.push_back({place.process,
                                  {place.device_type, place.device_index},
                                  place.command.data(),
                                  {place.held, place.cached, place.spare}});
      }
      if (!survey.holders.empty()) surveys.budgets.push_back(std::move(survey));
    } catch (const Error& error) {
      surveys.skipped.emplace_back(error.what());
    }
  }
  return surveys;
}

}  // namespace vtensor
