// The copies of a sleep: out of its pages into what keeps their bytes, and back.
#pragma once

#include <chrono>
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

namespace vtensor {

// What keeps the bytes of a sleep: host memory, or a file. Gone with the last reference.
class SleepImage {
 public:
  explicit SleepImage(HostMemory memory) : memory_(std::move(memory)) {}
  // A file without a name in a folder, with space for so many bytes. Nothing else can open or
  // replace it, and the system takes it back whatever becomes of the process. `operation` is for
  // messages, here and below. Throws std::system_error.
  SleepImage(const char* operation, const std::string& folder, std::size_t bytes);
  ~SleepImage();
  SleepImage(const SleepImage&) = delete;
  SleepImage& operator=(const SleepImage&) = delete;

  const HostMemory& memory() const { return memory_; }  // null if it is a file
  // Throw std::system_error.
  void write(const char* operation, const std::byte* from, std::size_t bytes, std::size_t offset);
  void read(const char* operation, std::byte* to, std::size_t bytes, std::size_t offset);
  // Has what was written on the disk: until then, an error of the disk is not reported.
  void settle(const char* operation);

 private:
  const HostMemory memory_;
  const int file_ = -1;
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
  // memory, or on the disk. Throws DriverError,
  // TimedOut, std::system_error.
  std::size_t step();

 private:
  // The next parts, cut to `most` bytes together.
  std::vector<SleepPart> next(std::size_t most);
  // Launches the copies of parts, which are staged at `stage` if their image is a file.
  void launch(std::span<const SleepPart> parts, std::byte* stage);
  // Writes staged bytes to their files, or reads them.
  void move_files(std::span<const SleepPart> parts, std::byte* stage);
  void copy_out();
  void copy_in();
  FencePtr launched();  // a fence after all copies so far
  void await(const FencePtr& fence);
  SleepImage& image(const SleepPart& part) { return *images_.at(part.sleep); }
  std::byte* stage(std::size_t i) { return stages_ ? stages_.get() + i % 2 * kStage : nullptr; }

  static constexpr std::size_t kStage = std::size_t{4} << 20;

  const std::shared_ptr<PagePool> pool_;
  const char* const operation_;
  const CopyDirection direction_;
  std::vector<SleepPart> parts_;
  const Images images_;
  std::size_t bytes_ = 0, done_ = 0;
  std::size_t part_ = 0, inside_ = 0;  // the next byte: in which part, and where
  // Mapped, and not of the heap, which may keep what is freed.
  struct Unmap {
    void operator()(std::byte* stages) const noexcept;
  };
  // Two halves, if there is a file: one is read or written while the other is copied.
  std::unique_ptr<std::byte[], Unmap> stages_;
};

}  // namespace vtensor
