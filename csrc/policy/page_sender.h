// The thread that answers readers in other processes, which ask a pool for pages of a device
// (vmm/page_socket.h). It sleeps until a reader asks.
#pragma once

#include <memory>
#include <thread>

#include "base/descriptor.h"

namespace vtensor {

class PagePool;
class SharedFile;

class PageSender {
 public:
  // Throws DriverError if the system has no descriptor or no thread. A sleeping thread does not
  // keep `pool` alive.
  PageSender(const char* operation, const std::shared_ptr<PagePool>& pool);
  // Waits for the thread to end, unless the caller is the thread.
  ~PageSender();
  PageSender& operator=(PageSender&&) = delete;

  // The reader's end of a new socket. Throws DriverError.
  Descriptor connect(const char* operation, PagePool& pool);

 private:
  struct Sockets;
  static bool serve(const SharedFile& socket, const std::weak_ptr<PagePool>& pool);
  static void run(const std::weak_ptr<PagePool>& pool, const std::shared_ptr<Sockets>& sockets);

  std::shared_ptr<Sockets> sockets_;  // shared with the thread, which may outlive this object
  std::unique_ptr<std::thread> thread_;
};

}  // namespace vtensor
