// fork(2) as a fork of every tensor (I13). The child's mappings are private, but a private mapping
// of a memfd shows the parent's later writes to pages that the child has not written yet. So before
// the fork the parent's pages become copy-on-write too, and count a reference for the child until
// it is gone: no write reaches them, and no other client gets them.
//
// A child is gone when the write end of a pipe that it inherits is closed: by its exit, or by exec.
#pragma once

#include <vector>

#include "vmm/page.h"

namespace vtensor {

class PagePool;

// Pages that forked children still see.
class PagesInChildren {
 public:
  PagesInChildren() = default;
  ~PagesInChildren();
  PagesInChildren(const PagesInChildren&) = delete;
  PagesInChildren& operator=(const PagesInChildren&) = delete;

  bool empty() const { return children_.empty(); }
  std::size_t size() const;
  // Before fork(2). If the process has no file descriptor left, the references stay for good.
  void add(std::vector<Page*> pages);
  // After fork(2), in the parent: the child alone holds the write end now.
  void seal();
  // One page whose child is gone, or null.
  Page* take_back() noexcept;

 private:
  struct Child {
    int read_end;   // -1 if there is no pipe
    int write_end;  // -1 once sealed
    std::vector<Page*> pages;
  };
  std::vector<Child> children_;
};

// `pool` takes part in every fork(2) until `leave_forks`. To be called after its driver was made,
// because handlers run in reverse order before a fork.
void join_forks(PagePool* pool);
void leave_forks(PagePool* pool);

}  // namespace vtensor
