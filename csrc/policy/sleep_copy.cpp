#include "policy/sleep_copy.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <system_error>
#include <utility>

#include "base/errors.h"
#include "base/process.h"
#include "vmm/pending_work.h"

namespace vtensor {

namespace {

constexpr std::size_t kStagesInStep = 16;

// `n` is what the operating system answered: bytes, or -1. False if a signal came first.
bool checked(const char* operation, const char* what, const char* remedy, ssize_t n) {
  if (n > 0) return true;
  const int error = n == 0 ? EIO : errno;  // the file has ended too early
  if (error == EINTR) return false;
  throw std::system_error(error, std::generic_category(),
                          text("[", operation, "] the temporary file cannot be ", what, remedy));
}

constexpr const char* kNothingFell = ": nothing fell asleep; free space, or name another folder";

// O_TMPFILE, or unlinked at once where the file system lacks that. -1 with errno.
int open_unnamed(const std::string& folder) {
  const int file = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return file;
  std::string name = folder + "/vtensor-XXXXXX";
  const int named = mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) unlink(name.c_str());
  return named;
}

int make_file(const char* operation, const std::string& folder, std::size_t bytes) {
  const int file = open_unnamed(folder);
  if (file < 0) {
    throw std::system_error(
        errno, std::generic_category(),
        text("[", operation, "] no temporary file can be made in the folder", kNothingFell));
  }
  int error = 0;
  do {
    error = posix_fallocate(file, 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error == 0) return file;
  close(file);
  throw std::system_error(
      error, std::generic_category(),
      text("[", operation, "] the folder has no space for ", bytes, " bytes", kNothingFell));
}

}  // namespace

SleepImage::SleepImage(const char* operation, const std::string& folder, std::size_t bytes)
    : file_(make_file(operation, folder, bytes)) {}

SleepImage::~SleepImage() {
  if (file_ < 0) return;
  // A child that was forked meanwhile has the descriptor too: the bytes go all the same.
  if (!in_forked_child() && ftruncate(file_, 0) != 0) {
    // Then they go with the child's descriptor.
  }
  close(file_);
}

void SleepImage::write(const char* operation, const std::byte* from, std::size_t bytes,
                       std::size_t offset) {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t n = pwrite(file_, from + done, bytes - done, static_cast<off_t>(offset + done));
    if (checked(operation, "written", kNothingFell, n)) done += static_cast<std::size_t>(n);
  }
  // Only a hint: the disk begins now.
  sync_file_range(file_, static_cast<off_t>(offset), static_cast<off_t>(bytes),
                  SYNC_FILE_RANGE_WRITE);
}

void SleepImage::read(const char* operation, std::byte* to, std::size_t bytes, std::size_t offset) {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t n = pread(file_, to + done, bytes - done, static_cast<off_t>(offset + done));
    if (checked(operation, "read",
                ": all stays asleep; give the contents up with wake(discard=True)", n))
      done += static_cast<std::size_t>(n);
  }
}

void SleepImage::settle(const char* operation) {
  while (file_ >= 0 &&
         !checked(operation, "written", kNothingFell, fdatasync(file_) == 0 ? 1 : -1));
}

SleepCopy::SleepCopy(std::shared_ptr<PagePool> pool, const char* operation, CopyDirection direction,
                     std::span<const SleepPart> parts, Images images)
    : pool_(std::move(pool)),
      operation_(operation),
      direction_(direction),
      images_(std::move(images)) {
  for (const SleepPart& part : parts) {
    const auto found = images_.find(part.sleep);
    if (found == images_.end()) continue;
    parts_.push_back(part);
    bytes_ += part.bytes;
    if (found->second->memory() || stages_) continue;
    void* const at =
        mmap(nullptr, 2 * kStage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    stages_.reset(static_cast<std::byte*>(at));
  }
}

void SleepCopy::Unmap::operator()(std::byte* stages) const noexcept { munmap(stages, 2 * kStage); }

std::vector<SleepPart> SleepCopy::next(std::size_t most) {
  std::vector<SleepPart> some;
  for (std::size_t left = most; left != 0 && part_ < parts_.size();) {
    const SleepPart& part = parts_[part_];
    const std::size_t n = std::min(left, part.bytes - inside_);
    some.push_back({part.at + inside_, part.sleep, part.offset + inside_, n});
    left -= n;
    inside_ += n;
    done_ += n;
    if (inside_ < part.bytes) continue;
    ++part_;
    inside_ = 0;
  }
  return some;
}

void SleepCopy::launch(std::span<const SleepPart> parts, std::byte* stage) {
  Driver& driver = pool_->driver();
  for (const SleepPart& part : parts) {
    const HostMemory& memory = image(part).memory();
    std::byte* const kept = memory ? memory.get() + part.offset : stage;
    if (!memory) stage += part.bytes;
    driver.copy(direction_, part.at, kept, part.bytes, driver.copy_stream());
  }
}

void SleepCopy::move_files(std::span<const SleepPart> parts, std::byte* stage) {
  for (const SleepPart& part : parts) {
    SleepImage& kept = image(part);
    if (kept.memory()) continue;
    direction_ == CopyDirection::out ? kept.write(operation_, stage, part.bytes, part.offset)
                                     : kept.read(operation_, stage, part.bytes, part.offset);
    stage += part.bytes;
  }
}

FencePtr SleepCopy::launched() {
  Driver& driver = pool_->driver();
  return driver.fence(driver.copy_stream());
}

void SleepCopy::await(const FencePtr& fence) {
  const std::chrono::nanoseconds patience = pool_->options().patience;
  if (wait_for(pool_->driver(), fence, patience)) return;
  throw TimedOut(operation_, patience, "a copy has not ended");
}

// A file is written while the next copies run.
void SleepCopy::copy_out() {
  std::vector<SleepPart> staged;
  FencePtr copied;
  for (std::size_t i = 0; i <= kStagesInStep; ++i) {
    const std::vector<SleepPart> some = next(i < kStagesInStep ? kStage : 0);
    launch(some, stage(i));
    const FencePtr before = std::exchange(copied, launched());
    if (!staged.empty()) {
      await(before);
      move_files(staged, stage(i + 1));
    }
    if (stages_) staged = some;
  }
}

// A file is read while the last copies run.
void SleepCopy::copy_in() {
  std::array<FencePtr, 2> copied;
  for (std::size_t i = 0; i < kStagesInStep; ++i) {
    const std::vector<SleepPart> some = next(kStage);
    if (stages_) {
      await(copied[i % 2]);
      move_files(some, stage(i));
    }
    launch(some, stage(i));
    copied[i % 2] = launched();
  }
}

std::size_t SleepCopy::step() {
  try {
    direction_ == CopyDirection::out ? copy_out() : copy_in();
    await(launched());
    if (direction_ == CopyDirection::out && part_ == parts_.size()) {
      for (const auto& [number, image] : images_) image->settle(operation_);
    }
  } catch (...) {
    // Copies that were launched before the refusal still use this memory.
    try {
      await(launched());
    } catch (...) {
      static_cast<void>(stages_.release());
      static_cast<void>(new Images(images_));
    }
    throw;
  }
  return done_;
}

}  // namespace vtensor
