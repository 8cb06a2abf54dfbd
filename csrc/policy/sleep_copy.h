// The copies of a sleep: out of its pages into what keeps their bytes, and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "driver/driver.h"
#include "policy/page_pool.h"
#include "policy/sleep.h"
#include "vmm/shared_file.h"

namespace vtensor {

// What keeps the bytes of a sleep: host memory, or a mapped file. Gone with the last reference.
class SleepImage {
 public:
  explicit SleepImage(HostMemory memory) : memory_(std::move(memory)) {}
  // A file without a name in a folder, with space for so many bytes. Nothing else can open or
  // replace it, and the system takes it back whatever becomes of the process. `operation` is for
  // messages, here and below. Throws std::system_error.
  SleepImage(const char* operation, const std::string& folder, std::size_t bytes);

  std::byte* at(std::size_t offset) const { return (file_ ? file_->at() : memory_.get()) + offset; }
  // Has bytes of a file in memory, to be copied `in` to it or `out`. What the disk refuses is an
  // error here, and would be SIGBUS at the copy. Throws std::system_error.
  void make_present(const char* operation, std::size_t offset, std::size_t bytes,
                    CopyDirection direction);
  // Has what was copied to a file on the disk, and no more in memory than the system keeps of
  // files. Throws std::system_error.
  void flush(const char* operation);

 private:
  const HostMemory memory_;  // null if it is a file
  std::unique_ptr<SharedFile> file_;
};

// Copies parts some at a time, so that the caller can say how far it is, and can stop in between:
// no copy is under way then.
class SleepCopy {
 public:
  using Images = std::map<std::uint64_t, std::shared_ptr<SleepImage>>;  // by number of the sleep

  // Copies the parts that have an image. Requires: they stay mapped until it is gone.
  SleepCopy(std::shared_ptr<PagePool> pool, const char* operation, CopyDirection direction,
            std::span<const SleepPart> parts, Images images);

  std::size_t bytes() const { return bytes_; }
  // Copies about 64 MiB more; returns how many bytes are copied so far. All of them are safe: in
  // memory, or on the disk. Throws DriverError, TimedOut, std::system_error.
  std::size_t step();

 private:
  const std::shared_ptr<PagePool> pool_;
  const char* const operation_;
  const CopyDirection direction_;
  std::vector<SleepPart> parts_;
  const Images images_;
  std::size_t bytes_ = 0, done_ = 0;
  std::size_t part_ = 0, inside_ = 0;  // the next byte: in which part, and where
};

}  // namespace vtensor
