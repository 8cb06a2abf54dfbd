// What test programs share: waits with a bound, the ends of pools, forked children, threads, and
// the files and mappings of host drivers.
#pragma once

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace vtensor {

inline constexpr std::chrono::seconds kPatience(20);

// Polls with a bound, so that a test that waits in vain fails instead of hanging.
template <class Condition>
bool comes_true(Condition condition, std::chrono::milliseconds bound = kPatience) {
  const auto deadline = std::chrono::steady_clock::now() + bound;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

// That nothing has the pool any more, and nothing of it is left. The mapper may be the last to let
// it go, and the next one begins the simulated device anew.
template <class T, class Pool>
void check_gone(const std::weak_ptr<Pool>& pool) {
  std::string left;
  comes_true([&] { return pool.expired() && (left = T::leaks()).empty(); });
  CHECK(pool.expired());
  CHECK(left == "");
}
template <class T, class Pool>
void let_go(std::shared_ptr<Pool>& pool) {
  const std::weak_ptr<Pool> left = std::exchange(pool, nullptr);
  check_gone<T>(left);
}

// What host drivers have: descriptors of their memfds, and mappings. Empty where there is nothing.
inline std::string host_leaks() {
  int files = 0, mappings = 0;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the iterator's own is listed too
    const auto target = std::filesystem::read_symlink(file, gone).string();
    files += target.find("memfd:vtensor") != std::string::npos;
  }
  std::ostringstream lines;
  lines << std::ifstream("/proc/self/maps").rdbuf();
  const std::string maps = lines.str();
  for (std::size_t at = 0; (at = maps.find("memfd:vtensor", at)) != std::string::npos; ++at)
    ++mappings;
  if (files + mappings == 0) return {};
  return std::to_string(files) + " files, " + std::to_string(mappings) + " mappings";
}

// Runs `body` in a forked child. Its exit status, 99 where it threw, or -signal.
inline int in_child(const std::function<int()>& body) {
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    // Not the handlers of doctest or a sanitizer.
    for (const int number : {SIGSEGV, SIGBUS, SIGABRT}) signal(number, SIG_DFL);
    try {
      _exit(body());
    } catch (...) {
      _exit(99);
    }
  }
  int status = 0;
  REQUIRE(waitpid(pid, &status, 0) == pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// That `body` returns 0 in so many forked children, one after the other.
inline void check_children(int count, const std::function<int()>& body) {
  int wrong = 0;
  for (int i = 0; i < count && wrong == 0; ++i) wrong = in_child(body);
  CHECK(wrong == 0);
}

// Runs `body(i)` in a thread for each i below `count`. Returns when all have ended.
template <class Body>
void in_threads(std::size_t count, Body body) {
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
  for (std::thread& thread : threads) thread.join();
}

// A thread that does the same again and again.
class Beside {
 public:
  explicit Beside(std::function<void()> step)
      : thread_([this, step = std::move(step)] {
          while (!over_) step();
        }) {}
  ~Beside() {
    over_ = true;
    thread_.join();
  }
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;

 private:
  std::atomic<bool> over_{false};
  std::thread thread_;
};

}  // namespace vtensor
