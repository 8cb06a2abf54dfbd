// The copies of a sleep: from its pages to a saved image, and back.
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

// The saved bytes of a sleep: host memory, or a mapped file.
class SleepImage {
 public:
  explicit SleepImage(HostMemory memory) : memory_(std::move(memory)) {}
  // A file without a name in a folder, with space for `bytes`: nothing else can open or replace the
  // file, and the system removes it however the process ends. `operation` is for messages, here and
  // below. Throws std::system_error.
  SleepImage(const char* operation, const std::string& folder, std::size_t bytes);

  std::byte* at(std::size_t offset) const { return (file_ ? file_->at() : memory_.get()) + offset; }
  // Brings bytes of a file into memory, before they are copied. A disk error throws here, and would
  // be SIGBUS at the copy. `direction`: of the copy. Throws std::system_error.
  void make_present(const char* operation, std::size_t offset, std::size_t bytes,
                    CopyDirection direction);
  // Writes a file's bytes to the disk, and drops them from this process's memory. Throws
  // std::system_error.
  void flush(const char* operation);

 private:
  const HostMemory memory_;  // null for a file
  std::unique_ptr<SharedFile> file_;
};

// Copies parts in steps, so that the caller can report progress, and can stop between steps, when
// no copy is under way.
class SleepCopy {
 public:
  using Images = std::map<std::uint64_t, std::shared_ptr<SleepImage>>;  // by number of a sleep

  // Copies the parts that have an image. Requires: the parts stay mapped while the object lives.
  SleepCopy(std::shared_ptr<PagePool> pool, const char* operation, CopyDirection direction,
            std::span<const SleepPart> parts, Images images);

  std::size_t bytes() const { return bytes_; }
  // Copies about 64 MiB more; returns how many bytes are copied so far. The last step writes files
  // to the disk. Throws DriverError, TimedOut, std::system_error.
  std::size_t step();

 private:
  const std::shared_ptr<PagePool> pool_;
  const char* const operation_;
  const CopyDirection direction_;
  std::vector<SleepPart> parts_;
  const Images images_;
  std::size_t bytes_ = 0, done_ = 0;
  std::size_t part_ = 0, inside_ = 0;  // the next byte: index of its part, and offset in the part
};

}  // namespace vtensor
