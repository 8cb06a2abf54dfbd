// Threads of our own. They take no signals: the program's handlers expect its own threads.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <memory>
#include <semaphore>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/calls.h"
#include "base/system_errors.h"

namespace vtensor {

// Blocks all signals but those of faults, which are the thread's own, in this thread while it
// lives, and for good in threads started meanwhile.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t others;
    sigfillset(&others);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&others, fault);
    pthread_sigmask(SIG_SETMASK, &others, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked& operator=(SignalsBlocked&&) = delete;

 private:
  sigset_t before_;
};

// Starts a thread that runs `body`. Returns once the thread has its thread-local data: the C
// library makes them at the first use, and ends the process if there are no mappings left. Throws
// DriverError with the message `refusal` if the system has no thread.
template <typename Body>
std::unique_ptr<std::thread> start_thread(const char* name, ThreadRole role,
                                          const std::string& refusal, Body body) try {
  const auto begun = std::make_shared<std::binary_semaphore>(0);
  const SignalsBlocked blocked;
  auto thread = std::make_unique<std::thread>([name, role, body = std::move(body), begun] {
    thread_role = role;
    pthread_setname_np(pthread_self(), name);
    begun->release();
    body();
  });
  static_cast<void>(begun->try_acquire_for(std::chrono::seconds(60)));
  return thread;
} catch (const std::system_error& error) {
  const int code = error.code().value();
  throw DriverError("pthread_create", code, errno_name(code), refusal);
}

}  // namespace vtensor
