// Stream captures, graphs and user objects of the simulated libcuda (a test double).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "sim_streams.h"

namespace simcuda {

// Calls the destructors of user objects in a thread of its own, as the real driver does.
class Destructors {
 public:
  void call(CUhostFn destructor, void* argument);
  // Whether this thread is inside a destructor: it may make no driver call.
  static bool is_calling();

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<std::pair<CUhostFn, void*>> waiting_;
  bool started_ = false;
};

using References = std::map<CUuserObject, unsigned>;

// The work and the references of a graph, or of an executable made from one.
struct Graph {
  std::vector<Work> nodes;
  References kept;
};

// A capture in progress, or one that events still remember.
struct Capture {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id thread;
  std::shared_ptr<SimStreams::Stream> origin;
  std::vector<std::shared_ptr<SimStreams::Stream>> joined;  // by waiting for an event of it
  CUgraph graph = nullptr;
  bool invalidated = false;
};

class SimGraphs {
 public:
  explicit SimGraphs(Destructors& destructors) : destructors_(destructors) {}

  CUresult begin(const std::shared_ptr<SimStreams::Stream>& stream, CUstreamCaptureMode mode);
  CUresult end(const std::shared_ptr<SimStreams::Stream>& stream, CUgraph* graph);
  // Whether a thread in that mode may make a call that captures must not overlap. Where not, the
  // captures in its way are invalidated.
  CUresult allow_unsafe_call(CUstreamCaptureMode mode);
  // Invalidates all captures in a context; whether there were any.
  bool invalidate_all(CUcontext context);

  Graph* find(CUgraph graph) { return find_in(graphs_, graph); }
  CUresult destroy(CUgraph graph);
  CUresult instantiate(CUgraphExec* executable, CUgraph graph);
  Graph* find(CUgraphExec executable) { return find_in(executables_, executable); }
  CUresult destroy(CUgraphExec executable);
  // Keeps the user objects of an executable for a launch of it. To be called when that is over.
  std::function<void()> keep_for_launch(const Graph& executable);

  CUresult make_object(CUuserObject* object, void* pointer, CUhostFn destructor,
                       unsigned references, unsigned flags);
  CUresult release_object(CUuserObject object, unsigned references);
  CUresult keep(CUgraph graph, CUuserObject object, unsigned references, unsigned flags);
  std::size_t objects() const { return objects_.size(); }

 private:
  struct Object {
    void* pointer = nullptr;
    CUhostFn destructor = nullptr;
    unsigned references = 0;
  };
  template <class Name>
  using Graphs = std::map<Name, std::unique_ptr<Graph>>;

  template <class Name>
  static Graph* find_in(const Graphs<Name>& all, Name name) {
    const auto found = all.find(name);
    return found == all.end() ? nullptr : found->second.get();
  }
  template <class Name>
  CUresult destroy_in(Graphs<Name>& all, Name name);
  void retain(const References& kept);
  void let_go(const References& kept);

  Destructors& destructors_;
  std::vector<std::shared_ptr<Capture>> captures_;
  Graphs<CUgraph> graphs_;
  Graphs<CUgraphExec> executables_;
  std::map<CUuserObject, std::unique_ptr<Object>> objects_;
};

}  // namespace simcuda
