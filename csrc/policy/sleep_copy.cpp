#include "policy/sleep_copy.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <system_error>
#include <utility>

#include "base/errors.h"

namespace vtensor {

namespace {

constexpr std::size_t kStep = std::size_t{64} << 20;
// Bytes of one copy: while it runs, the next bytes of a file are brought into memory.
constexpr std::size_t kPiece = std::size_t{4} << 20;
constexpr const char* kNothingFell = ": nothing fell asleep; free space, or name another folder";

std::system_error refused(const char* operation, int error, const char* what, const char* remedy) {
  return {error, std::generic_category(), text("[", operation, "] ", what, remedy)};
}

// Opens by O_TMPFILE, or unlinks at once if the file system lacks that. False with errno.
bool open_unnamed(SharedFile& file, const std::string& folder) {
  if (file.open(folder, O_TMPFILE | O_RDWR)) return true;
  if (errno != EOPNOTSUPP && errno != EISDIR) return false;
  std::string name = folder + "/vtensor-XXXXXX";
  file.take(Descriptor(mkostemp(name.data(), O_CLOEXEC)));
  return file.descriptor() >= 0 && unlink(name.c_str()) == 0;
}

}  // namespace

SleepImage::SleepImage(const char* operation, const std::string& folder, std::size_t bytes)
    : file_(std::make_unique<SharedFile>()) {
  if (!open_unnamed(*file_, folder))
    throw refused(operation, errno, "no temporary file can be made in the folder", kNothingFell);
  int error = 0;
  do {
    error = posix_fallocate(file_->descriptor(), 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error != 0) {
    throw refused(operation, error, text("the folder has no space for ", bytes, " bytes").c_str(),
                  kNothingFell);
  }
  if (!file_->map(bytes, bytes))
    throw refused(operation, errno, "files of the folder cannot be mapped", kNothingFell);
}

void SleepImage::make_present(const char* operation, std::size_t offset, std::size_t bytes,
                              CopyDirection direction) {
  if (!file_) return;
  const bool out = direction == CopyDirection::out;
  // EINVAL: Linux before 5.14, which has no such call.
  if (madvise(at(offset), bytes, out ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0 ||
      errno == EINVAL)
    return;
  const int error = errno == EFAULT ? EIO : errno;  // EFAULT stands for what would be SIGBUS
  if (out) throw refused(operation, error, "the temporary file cannot be written", kNothingFell);
  throw refused(operation, error, "the temporary file cannot be read",
                ": all stays asleep; give the contents up with wake(discard=True)");
}

void SleepImage::flush(const char* operation) {
  if (!file_) return;
  while (fdatasync(file_->descriptor()) != 0) {
    if (errno != EINTR)
      throw refused(operation, errno, "the temporary file cannot be written", kNothingFell);
  }
  madvise(at(0), file_->bytes(), MADV_DONTNEED);  // of this process's mapping only
}

SleepCopy::SleepCopy(std::shared_ptr<PagePool> pool, const char* operation, CopyDirection direction,
                     std::span<const SleepPart> parts, Images images)
    : pool_(std::move(pool)),
      operation_(operation),
      direction_(direction),
      images_(std::move(images)) {
  for (const SleepPart& part : parts) {
    if (!images_.contains(part.sleep)) continue;
    parts_.push_back(part);
    bytes_ += part.bytes;
  }
}

std::size_t SleepCopy::step() {
  Driver& driver = pool_->driver();
  try {
    for (std::size_t left = kStep; left != 0 && part_ < parts_.size();) {
      const SleepPart& part = parts_[part_];
      const std::size_t n = std::min({left, kPiece, part.bytes - inside_});
      SleepImage& image = *images_.at(part.sleep);
      image.make_present(operation_, part.offset + inside_, n, direction_);
      driver.copy(direction_, part.at + inside_, image.at(part.offset + inside_), n,
                  driver.copy_stream());
      left -= n;
      inside_ += n;
      done_ += n;
      if (inside_ < part.bytes) continue;
      ++part_;
      inside_ = 0;
    }
    await_copies(*pool_, operation_, "a copy");
    if (direction_ == CopyDirection::out && part_ == parts_.size()) {
      for (const auto& [number, image] : images_) image->flush(operation_);
    }
  } catch (...) {
    // Copies launched before the refusal still use the images: if waiting fails, these are leaked.
    try {
      await_copies(*pool_, operation_, "a copy");
    } catch (...) {
      static_cast<void>(new Images(images_));
    }
    throw;
  }
  return done_;
}

}  // namespace vtensor
