// The streams of the simulated libcuda (a test double): queues of work, events, and what tests hold
// back.
//
// Work is executed in the order of its stream, and behind what the stream waits for: at once
// where `eager` is set, otherwise when a call asks about it. What a stream that is held was given
// stays "running". Work that finds its memory not mapped, not accessible or replaced since its
// launch is an illegal access.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "sim_memory.h"

namespace simcuda {

struct Capture;

// What a stream was given to do.
struct Work {
  enum class Kind : std::uint8_t { fill, copy, to_host, from_host, read } kind = Kind::read;
  Address at = 0;
  std::size_t size = 0;
  unsigned char value = 0;  // fill
  Address from = 0;         // copy
  void* host = nullptr;     // to_host, from_host
  // The mappings that were there at the launch.
  std::vector<std::uint64_t> mappings{};
};

class SimStreams {
 public:
  static constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

  struct Stream;
  // A place in a stream: reached once so many of its items were executed.
  struct Point {
    std::shared_ptr<Stream> stream;  // null: always reached
    std::uint64_t items = 0;

    bool reached() const { return stream == nullptr || stream->done >= items; }
  };
  struct Item {
    enum class Kind : std::uint8_t { work, wait, record } kind = Kind::work;
    Work work{};
    std::vector<Point> behind{};
    // Executed not before that time; record: and only after so many queries.
    std::uint64_t queries = 0;
    std::chrono::steady_clock::time_point earliest{};
    std::function<void()> then{};  // once it was executed
  };
  struct Stream {
    CUcontext context = nullptr;
    bool blocking = true;  // in step with the context's default stream
    bool held = false;
    bool destroyed = false;
    std::uint64_t steps = 0;  // items that a held stream may still execute
    std::uint64_t done = 0;
    std::deque<Item> queue;
    std::shared_ptr<Capture> capture;

    std::uint64_t given() const { return done + queue.size(); }
  };
  struct Event {
    CUcontext context = nullptr;
    Point point;
    std::shared_ptr<Capture> capture;  // where it was last recorded in one
    std::uint64_t unseen = 0;          // queries answered "not ready" whatever it stands for
  };

  explicit SimStreams(SimMemory& memory) : memory_(memory) {}
  // What is queued names the streams that it waits for, which may wait for each other.
  ~SimStreams();
  SimStreams(const SimStreams&) = delete;
  SimStreams& operator=(const SimStreams&) = delete;

  CUstream make(CUcontext context, bool blocking);
  // Null where there is none of that name. `context`: of the default stream.
  std::shared_ptr<Stream> find(CUstream stream, CUcontext context);
  bool destroy(CUstream stream);
  CUevent make_event(CUcontext context);
  Event* find(CUevent event);
  bool destroy(CUevent event);
  std::size_t streams() const;
  std::size_t events() const { return events_.size(); }
  // A blocking stream of the context that is being captured, or null.
  std::shared_ptr<Stream> blocking_capture(CUcontext context) const;

  void launch(const std::shared_ptr<Stream>& stream, Work work);
  // As a kernel that runs for so long from now on.
  void occupy(const std::shared_ptr<Stream>& stream, double milliseconds);
  void wait(const std::shared_ptr<Stream>& stream, const Event& event);
  void record(const std::shared_ptr<Stream>& stream, Event* event);
  // Counts as one query of the event.
  bool passed(Event& event);
  bool idle(const std::shared_ptr<Stream>& stream);
  bool idle(CUcontext context);
  bool all_idle();
  // Synchronising waits events out that only want to be queried more often.
  void wait_out_queries();

  void hold(Stream& stream, bool held) {
    stream.held = held;
    stream.steps = 0;
  }
  void hold_all(bool held);
  void step(Stream& stream) { ++stream.steps; }
  void set_late(std::uint64_t queries, double milliseconds);
  void set_unseen(std::uint64_t queries) { unseen_queries_ = queries; }

  // Whether the work finds its memory accessible as it needs it.
  bool allows(const Work& work) const;
  // Executes what may be executed.
  void run();
  // Whether work that has not run yet was launched over a mapping in [at, at + size).
  bool touches(Address at, std::size_t size) const;
  std::uint64_t illegal_accesses() const { return illegal_accesses_; }
  void count_illegal_access() { ++illegal_accesses_; }
  // What a context is in error with, or CUDA_SUCCESS; and whether any is.
  CUresult error(CUcontext context) const;
  bool any_error() const { return !errors_.empty(); }

 private:
  // Those that were made, and the default ones.
  template <class Body>
  void each(Body body) const {
    for (const auto& [name, stream] : streams_) body(stream);
    for (const auto& [context, stream] : defaults_) body(stream);
  }
  template <class Is>
  bool is_any(Is is) const {
    bool found = false;
    each([&](const auto& stream) { found = found || is(*stream); });
    return found;
  }

  bool run_next(Stream& stream);
  void enqueue(const std::shared_ptr<Stream>& stream, Item item);
  std::vector<std::uint64_t> mappings_of(const Work& work) const;
  void execute(const Work& work, CUcontext context);

  SimMemory& memory_;
  std::map<CUstream, std::shared_ptr<Stream>> streams_;
  std::map<CUcontext, std::shared_ptr<Stream>> defaults_;
  std::map<CUevent, std::unique_ptr<Event>> events_;
  bool hold_new_ = false;
  std::uint64_t late_queries_ = 0, unseen_queries_ = 0;
  std::chrono::steady_clock::duration late_{};
  std::uint64_t illegal_accesses_ = 0;
  std::map<CUcontext, CUresult> errors_;
};

}  // namespace simcuda
