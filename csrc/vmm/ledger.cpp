#include "vmm/ledger.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>
#include <thread>

#include "base/align.h"
#include "base/process.h"
#include "base/system_errors.h"
#include "vmm/shared_file.h"

namespace vtensor {

using std::chrono::steady_clock;

namespace {

constexpr char kOperation[] = "shared budget";
constexpr char kFolder[] = "/dev/shm/";
constexpr std::size_t kLongestName = 64;
constexpr std::uint32_t kLayout = 3;
constexpr std::uint64_t kMagic = 0x7465677564627476;  // "vtbudget"
// The file is locked for the time of a few stores, unless its holder is stopped. Tries are counted,
// and not time: this process, or its machine, may have been stopped too. The kernel makes each
// pause some 50 us longer.
constexpr std::chrono::nanoseconds kLockPatience = std::chrono::seconds(1);
constexpr std::chrono::nanoseconds kLockPause = std::chrono::microseconds(100);
constexpr int kWithoutPause = 16;
constexpr int kLockTries = kWithoutPause + static_cast<int>(kLockPatience / (1.5 * kLockPause));
// How often a survey looks for answers.
constexpr std::chrono::nanoseconds kLook = std::chrono::milliseconds(1);

// Bytes of the file that serve as locks, in every layout. Apart, so that the kernel merges none.
constexpr off_t kFileLock = 0;
constexpr off_t kLife = 2;  // the first of one byte a place

off_t life_of(std::size_t place) { return kLife + static_cast<off_t>(place); }

DriverError lock_refused(int error, const std::string& path) {
  return refused(kOperation, Call::fcntl, error, "locking " + path,
                 "use a system with locks of open file descriptions on /dev/shm");
}

// Requests are numbered, and the numbers wrap around.
bool is_before(std::uint32_t one, std::uint32_t other) {
  return static_cast<std::int32_t>(one - other) < 0;
}

std::string prefix() { return text("vtensor-", geteuid(), "-"); }

bool is_name(std::string_view name) {
  constexpr std::string_view kLetters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  return !name.empty() && name.size() <= kLongestName &&
         name.find_first_not_of(kLetters) == std::string_view::npos;
}

// The names of this user's budgets, in order.
std::vector<std::string> names() {
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

std::string quoted(const std::string& name) { return "\"" + name + "\""; }

std::string command_of_process() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string command{std::istreambuf_iterator<char>(file), {}};
  std::replace(command.begin(), command.end(), '\0', ' ');
  command.erase(command.find_last_not_of(' ') + 1);
  return command;
}

}  // namespace

using Counter = std::atomic<std::uint64_t>;
static_assert(Counter::is_always_lock_free);

struct alignas(64) Ledger::Place {
  std::atomic<std::int64_t> process;  // stored last; 0: the place is free
  Counter held, wanted, cached, spare;
  std::atomic<std::uint32_t> answered;
  WakeWord word;
  std::int32_t device_type, device_index;
  std::array<char, 128> command;  // ends with a zero
};

struct Ledger::Content {
  std::uint64_t magic;
  std::uint32_t layout;
  std::atomic<std::uint32_t> last_request;
  std::uint64_t limit;
  std::array<Place, kMostPools> places;
  std::uint64_t last_word;  // kMagic, unless the file was cut, even if it was made longer since
};

// The file, open and mapped.
class Ledger::File : public SharedFile {
 public:
  // Null if the file has lost its name, or was ever cut. Valid for a few accesses.
  Content* whole() const noexcept {
    struct stat found{};
    const bool is_whole = fstat(descriptor(), &found) == 0 && found.st_nlink != 0 &&
                          is_long(found) && mapped() != nullptr &&
                          !cut_.load(std::memory_order_acquire) && mapped()->last_word == kMagic;
    return is_whole ? mapped() : nullptr;
  }
  // The content; once the file was cut, zeros for good. Valid for a few accesses, since the file
  // may be cut at any time. Requires: the file is mapped.
  Content& content() noexcept {
    struct stat found{};
    if (!cut_.load(std::memory_order_acquire) &&
        !(fstat(descriptor(), &found) == 0 && is_long(found))) {
      // In one step, because other threads may be about to use the mapping.
      void* const at = mmap(mapped(), sizeof(Content), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
      cut_.store(at != MAP_FAILED, std::memory_order_release);
    }
    return *mapped();
  }

 private:
  static bool is_long(const struct stat& file) {
    return file.st_size >= static_cast<off_t>(sizeof(Content));
  }
  Content* mapped() const { return reinterpret_cast<Content*>(at()); }

  std::atomic<bool> cut_{false};  // the mapping is private zeros, not the file
};

// Locks the file for a scope. Throws TimedOut after 1 s, and DriverError.
class Ledger::Locked {
 public:
  // `meter` is null where the pool's driver may have ended.
  Locked(const Ledger& ledger, CallMeter* meter) : file_(*ledger.file_) {
    int error = file_.try_lock(meter, kFileLock);
    for (int tries = 0; error != 0; ++tries) {
      if (error != EAGAIN && error != EACCES) throw lock_refused(error, ledger.path());
      if (tries == kLockTries) {
        throw TimedOut("shared budget", kLockPatience,
                       "another process has locked the shared budget " + quoted(ledger.name()) +
                           " and is stopped: let it go on, or kill it");
      }
      tries < kWithoutPause ? std::this_thread::yield() : std::this_thread::sleep_for(kLockPause);
      error = file_.try_lock(nullptr, kFileLock);
    }
  }
  ~Locked() { file_.unlock(kFileLock); }
  Locked& operator=(Locked&&) = delete;

 private:
  const SharedFile& file_;
};

// -- the file

std::string Ledger::path() const { return kFolder + prefix() + name_; }

Ledger::Ledger(CallMeter& meter, const std::string& name, int flags)
    : meter_(meter), name_(name), file_(std::make_shared<File>()) {
  make_call(meter_, kOperation, Call::open, EMFILE, "opening " + path(),
            "raise the limit on descriptors (ulimit -n), or see which users may write there",
            [&] { return file_->open(path(), O_RDWR | O_NOFOLLOW | flags); });
  struct stat found{};
  if (fstat(file_->descriptor(), &found) != 0 || !S_ISREG(found.st_mode) ||
      found.st_uid != geteuid()) {
    throw Error("[shared budget] ", path(),
                " is no file of this user: remove it, or use another name");
  }
}

// Makes the file long enough, with its memory, and resets it.
void Ledger::begin(std::uint64_t limit) {
  make_call(meter_, kOperation, Call::fallocate, ENOSPC,
            text("making ", sizeof(Content), " bytes of ", path()),
            "free memory in /dev/shm, or raise the limit on files (ulimit -f)", [this] {
              int result;
              do {
                result = fallocate(file_->descriptor(), 0, 0, sizeof(Content));
              } while (result != 0 && errno == EINTR);
              return result == 0;
            });
  map();
  Content& content = file_->content();
  std::memset(static_cast<void*>(&content), 0, sizeof(Content));
  content.limit = limit;
  content.layout = kLayout;
  content.magic = content.last_word = kMagic;
}

void Ledger::map() {
  make_call(meter_, kOperation, Call::mmap, ENOMEM, "mapping " + path(),
            "raise the limits on mappings (vm.max_map_count) and address space",
            [this] { return file_->map(sizeof(Content), sizeof(Content)); });
}

bool Ledger::has_other_layout() const { return layout() != 0 && layout() != kLayout; }

std::uint32_t Ledger::layout() const {
  struct {
    std::uint64_t magic;
    std::uint32_t layout;
  } head{};
  static_assert(offsetof(Content, layout) == offsetof(decltype(head), layout));
  const ssize_t bytes = pread(file_->descriptor(), &head, sizeof(head), 0);
  return bytes == sizeof(head) && head.magic == kMagic ? head.layout : 0;
}

// Throws Error if the file has lost its name, because the next pool of the name makes another, or
// was cut, because its pools' holdings are lost then.
Ledger::Content& Ledger::require_whole() const {
  if (Content* const content = file_->whole()) return *content;
  struct stat found{};
  const bool removed = fstat(file_->descriptor(), &found) == 0 && found.st_nlink == 0;
  const std::string was =
      removed ? "removed, so pools that are made now do not see what this one holds: it takes no "
                "more; close the pools that were made before, and make them again"
              : "made shorter by another program, so nothing says what its pools hold: they take "
                "no more; close them all, and make them again";
  throw Error("[shared budget] the file ", path(), " of the shared budget ", quoted(name_), " was ",
              was);
}

bool Ledger::is_linked() const {
  struct stat found{};
  return stat(path().c_str(), &found) == 0 &&
         id_of(file_->descriptor()) == FileId{found.st_dev, found.st_ino};
}

bool Ledger::is_alive(std::size_t place) const { return file_->is_locked(life_of(place), 1); }

bool Ledger::any_alive() const { return file_->is_locked(kLife, 0); }

bool Ledger::any_stays() const {
  if (!any_alive()) return false;
  const Content* const content = file_->whole();
  if (content == nullptr) return true;
  for (std::size_t i = 0; i < kMostPools; ++i) {
    if (content->places[i].process != 0 && is_alive(i)) return true;
  }
  return false;
}

void Ledger::remove_if_unused() const {
  if (!any_stays() && is_linked()) unlink(path().c_str());
}

// -- a place

std::unique_ptr<Ledger> Ledger::join(CallMeter& meter, const std::string& name, std::uint64_t limit,
                                     Device device) {
  refuse_in_forked_child("Pool");
  if (!is_name(name)) {
    throw InvalidArgument("[Pool] ", quoted(name), " cannot name a shared budget: give 1 to ",
                          kLongestName, " letters, digits, dots, dashes and underscores");
  }
  for (;;) {
    std::unique_ptr<Ledger> ledger(new Ledger(meter, name, O_CREAT));
    const Locked locked(*ledger, &meter);
    if (!ledger->is_linked()) continue;  // the file was removed meanwhile, by its last pool
    try {
      ledger->take_place(limit, device);
    } catch (...) {
      ledger->remove_if_unused();
      throw;
    }
    return ledger;
  }
}

void Ledger::take_place(std::uint64_t limit, Device device) {
  if (!any_alive()) {
    begin(limit);
  } else if (has_other_layout()) {
    throw Error("[Pool] the shared budget ", quoted(name_),
                " is kept by another version of vtensor, in layout ", layout(),
                " where this one has ", kLayout, ": use one version, or another name");
  } else {
    map();
  }
  Content& content = require_whole();
  if (content.limit != limit) {
    throw InvalidArgument("[Pool] a budget of ", limit, " bytes was asked for, the shared budget ",
                          quoted(name_), " has ", content.limit,
                          ": give all its pools one budget, or use another name");
  }
  std::size_t free = 0;
  while (free < kMostPools && is_alive(free)) ++free;
  if (free == kMostPools) {
    throw Error("[Pool] the shared budget ", quoted(name_), " has ", kMostPools,
                " pools, and room for no more: close some, or use another name");
  }
  Place& place = content.places[free];
  place.process = 0;
  place.held = place.wanted = place.cached = place.spare = 0;
  const int error = file_->try_lock(&meter_, life_of(free));
  if (error != 0) throw lock_refused(error, path());
  place.word.reset();
  place.answered = answered_ = content.last_request;
  place.device_type = device.type;
  place.device_index = device.index;
  place.command.fill(0);
  command_of_process().copy(place.command.data(), place.command.size() - 1);
  place.process = getpid();
  place_ = free;
  limit_ = limit;
}

Ledger::~Ledger() {
  if (place_ == kMostPools) return;
  Place& place = own();
  place.held = place.wanted = 0;
  place.process = 0;
  try {
    const Locked locked(*this, nullptr);
    file_->unlock(life_of(place_));  // locked, so that one of two pools that leave is the last
    remove_if_unused();
  } catch (...) {
    // The file stays: the next pool of its name finds no living pool there, and resets it.
    file_->unlock(life_of(place_));
  }
}

void Ledger::leave_at_exit() noexcept {
  try {
    const Locked locked(*this, nullptr);
    own().process = 0;  // what it holds counts until the process has ended
    remove_if_unused();
  } catch (...) {
    return;  // the file stays, as when a process is killed
  }
}

Ledger::Place& Ledger::own() const { return file_->content().places[place_]; }

Ledger::Balance Ledger::balance() const { return balance(file_->content()); }

Ledger::Balance Ledger::balance(const Content& content) const {
  Balance sum;
  for (std::size_t i = 0; i < kMostPools; ++i) {
    const Place& place = content.places[i];
    const std::uint64_t held = place.held, wanted = place.wanted;
    if (i == place_ || (held == 0 && wanted == 0) || !is_alive(i)) continue;
    sum.held_elsewhere += held;
    sum.spared_elsewhere += std::min(held, place.cached.load() + place.spare.load());
    sum.wanted_elsewhere += wanted;
  }
  sum.room = sub_sat(limit_, held_ + sum.held_elsewhere);
  return sum;
}

bool Ledger::charge(std::uint64_t bytes) {
  const Locked locked(*this, &meter_);
  Content& content = require_whole();
  if (bytes - held_ > balance(content).room) return false;
  content.places[place_].held = held_ = bytes;
  return true;
}

void Ledger::hold(std::uint64_t bytes) noexcept { own().held = held_ = bytes; }

// -- requests

void Ledger::want(std::int64_t bytes) noexcept {
  own().wanted = wanted_ += static_cast<std::uint64_t>(bytes);
}

std::uint32_t Ledger::request() noexcept {
  Content& content = file_->content();
  const std::uint32_t request = ++content.last_request;
  for (std::size_t i = 0; i < kMostPools; ++i) {
    if (i != place_ && content.places[i].process != 0) content.places[i].word.wake();
  }
  return request;
}

bool Ledger::answered(std::uint32_t request) const {
  const Content& content = file_->content();
  for (std::size_t i = 0; i < kMostPools; ++i) {
    const Place& place = content.places[i];
    if (i != place_ && place.process != 0 && is_before(place.answered, request) && is_alive(i))
      return false;
  }
  return true;
}

std::optional<std::uint32_t> Ledger::unanswered() const noexcept {
  const std::uint32_t last = file_->content().last_request;
  return last == answered_ ? std::nullopt : std::optional(last);
}

void Ledger::answer(std::uint32_t request, std::uint64_t cached, std::uint64_t spare) noexcept {
  Place& place = own();
  place.cached = cached;
  place.spare = spare;
  place.answered = answered_ = request;
}

std::function<WakeWord&()> Ledger::wake_word() const {
  return
      [file = file_, place = place_]() -> WakeWord& { return file->content().places[place].word; };
}

// -- all ledgers

std::pair<std::vector<Ledger::Survey>, std::vector<std::string>> Ledger::survey(
    std::chrono::nanoseconds patience) {
  refuse_in_forked_child("shared budgets");
  CallMeter meter;
  const auto until = steady_clock::now() + patience;
  std::vector<Survey> surveys;
  std::vector<std::string> skipped;
  std::vector<std::unique_ptr<Ledger>> ledgers;
  std::vector<std::uint32_t> requests;
  for (const std::string& name : names()) {
    try {
      std::unique_ptr<Ledger> ledger(new Ledger(meter, name, 0));
      const Locked locked(*ledger, &meter);  // locked, so that no process resets it
      if (!ledger->any_alive() || ledger->has_other_layout()) continue;
      ledger->map();
      ledger->require_whole();
      requests.push_back(ledger->request());
      ledgers.push_back(std::move(ledger));
    } catch (const DriverError& error) {
      if (error.code != ENOENT) skipped.emplace_back(error.what());  // ENOENT: its pools have left
    } catch (const Error& error) {
      skipped.emplace_back(error.what());
    }
  }
  for (std::size_t n = 0; n < ledgers.size(); ++n) {
    while (!ledgers[n]->answered(requests[n]) && steady_clock::now() < until)
      std::this_thread::sleep_for(kLook);
    try {
      Survey survey = ledgers[n]->read();
      if (!survey.holders.empty()) surveys.push_back(std::move(survey));
    } catch (const Error& error) {
      skipped.emplace_back(error.what());
    }
  }
  return {std::move(surveys), std::move(skipped)};
}

Ledger::Survey Ledger::read() const {
  const Locked locked(*this, &meter_);  // all figures of one moment
  const Content& content = file_->content();
  Survey survey{name_, content.limit, {}};
  for (std::size_t i = 0; i < kMostPools; ++i) {
    const Place& place = content.places[i];
    if (place.process == 0 || !is_alive(i)) continue;
    survey.holders.push_back({place.process,
                              {place.device_type, place.device_index},
                              place.command.data(),
                              place.held,
                              place.cached,
                              place.spare});
  }
  return survey;
}

}  // namespace vtensor
