#include "sim_streams.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace simcuda {
namespace {

std::chrono::steady_clock::duration duration(double milliseconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double, std::milli>(milliseconds));
}

}  // namespace

SimStreams::~SimStreams() {
  each([](const auto& stream) { stream->queue.clear(); });
}

CUstream SimStreams::make(CUcontext context, bool blocking) {
  auto stream = std::make_shared<Stream>();
  stream->context = context;
  stream->blocking = blocking;
  stream->held = hold_new_;
  const auto name = reinterpret_cast<CUstream>(stream.get());
  streams_.emplace(name, std::move(stream));
  return name;
}

std::shared_ptr<SimStreams::Stream> SimStreams::find(CUstream stream, CUcontext context) {
  // 0, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD: the last is not simulated apart.
  if (reinterpret_cast<std::uintptr_t>(stream) <= 2) {
    auto& only = defaults_[context];
    if (only == nullptr) {
      only = std::make_shared<Stream>();
      only->context = context;
      only->held = hold_new_;
    }
    return only;
  }
  const auto found = streams_.find(stream);
  return found == streams_.end() || found->second->destroyed ? nullptr : found->second;
}

bool SimStreams::destroy(CUstream stream) {
  const auto found = streams_.find(stream);
  if (found == streams_.end() || found->second->destroyed) return false;
  found->second->destroyed = true;  // forgotten once its work is done
  return true;
}

CUevent SimStreams::make_event(CUcontext context) {
  auto event = std::make_unique<Event>();
  event->context = context;
  const auto name = reinterpret_cast<CUevent>(event.get());
  events_.emplace(name, std::move(event));
  return name;
}

SimStreams::Event* SimStreams::find(CUevent event) {
  const auto found = events_.find(event);
  return found == events_.end() ? nullptr : found->second.get();
}

bool SimStreams::destroy(CUevent event) { return events_.erase(event) != 0; }

std::size_t SimStreams::streams() const {
  return static_cast<std::size_t>(
      std::ranges::count_if(streams_, [](const auto& entry) { return !entry.second->destroyed; }));
}

std::shared_ptr<SimStreams::Stream> SimStreams::blocking_capture(CUcontext context) const {
  for (const auto& [name, stream] : streams_) {
    if (stream->context == context && stream->blocking && stream->capture != nullptr) return stream;
  }
  return nullptr;
}

void SimStreams::enqueue(const std::shared_ptr<Stream>& stream, Item item) {
  // The default stream and the blocking ones wait for each other.
  const auto legacy = find(CUstream{}, stream->context);
  if (stream->blocking) {
    each([&](const auto& other) {
      const bool in_step = other->blocking && other->context == stream->context;
      if (!in_step || other == stream || (stream != legacy && other != legacy)) return;
      if (!other->queue.empty()) item.behind.push_back({other, other->given()});
    });
  }
  stream->queue.push_back(std::move(item));
}

void SimStreams::launch(const std::shared_ptr<Stream>& stream, Work work) {
  work.mappings = mappings_of(work);
  Item item;
  item.work = std::move(work);
  enqueue(stream, std::move(item));
}

void SimStreams::occupy(const std::shared_ptr<Stream>& stream, double milliseconds) {
  Item item;
  item.kind = Item::Kind::wait;
  item.earliest = std::chrono::steady_clock::now() + duration(milliseconds);
  enqueue(stream, std::move(item));
}

void SimStreams::wait(const std::shared_ptr<Stream>& stream, const Event& event) {
  Item item;
  item.kind = Item::Kind::wait;
  item.behind = {event.point};
  enqueue(stream, std::move(item));
}

void SimStreams::record(const std::shared_ptr<Stream>& stream, Event* event) {
  Item item;
  item.kind = Item::Kind::record;
  item.queries = late_queries_;
  item.earliest = std::chrono::steady_clock::now() + late_;
  enqueue(stream, std::move(item));
  event->point = {stream, stream->given()};
  event->capture = nullptr;
  event->unseen = unseen_queries_;
}

bool SimStreams::passed(Event& event) {
  run();
  if (event.unseen != 0) {
    --event.unseen;
    return false;
  }
  if (event.point.reached()) return true;
  Stream& stream = *event.point.stream;
  Item& item = stream.queue[event.point.items - stream.done - 1];
  if (item.queries != 0 && item.queries != kNever) --item.queries;
  return false;
}

bool SimStreams::idle(const std::shared_ptr<Stream>& stream) {
  run();
  if (!stream->queue.empty()) return false;
  // What the default stream has done includes what the blocking ones have.
  if (stream != find(CUstream{}, stream->context)) return true;
  return !is_any([&](const Stream& other) {
    return other.blocking && other.context == stream->context && !other.queue.empty();
  });
}

bool SimStreams::idle(CUcontext context) {
  run();
  return !is_any(
      [&](const Stream& stream) { return stream.context == context && !stream.queue.empty(); });
}

bool SimStreams::all_idle() {
  run();
  return !is_any([&](const Stream& stream) {
    return !stream.queue.empty() && error(stream.context) == CUDA_SUCCESS;
  });
}

void SimStreams::wait_out_queries() {
  each([](const auto& stream) {
    for (Item& item : stream->queue) {
      if (item.queries != kNever) item.queries = 0;
    }
  });
}

void SimStreams::hold_all(bool held) {
  hold_new_ = held;
  each([&](const auto& stream) { hold(*stream, held); });
}

void SimStreams::set_late(std::uint64_t queries, double milliseconds) {
  late_queries_ = queries;
  late_ = duration(milliseconds);
  if (queries != 0 || milliseconds > 0) return;
  each([](const auto& stream) {
    for (Item& item : stream->queue) {
      item.queries = 0;
      item.earliest = {};
    }
  });
}

// Executes the first item of a stream; false where it may not be executed yet.
bool SimStreams::run_next(Stream& stream) {
  if (error(stream.context) != CUDA_SUCCESS) return false;
  if (stream.queue.empty() || (stream.held && stream.steps == 0)) return false;
  const Item& item = stream.queue.front();
  if (!std::ranges::all_of(item.behind, &Point::reached)) return false;
  if (item.queries != 0 || std::chrono::steady_clock::now() < item.earliest) return false;
  if (item.kind == Item::Kind::work) execute(item.work, stream.context);
  if (item.then && error(stream.context) == CUDA_SUCCESS) item.then();
  stream.queue.pop_front();
  ++stream.done;
  if (stream.held) --stream.steps;
  return true;
}

void SimStreams::run() {
  for (bool moved = true; moved;) {
    moved = false;
    each([&](const auto& stream) {
      while (run_next(*stream)) moved = true;
    });
  }
  std::erase_if(streams_, [](const auto& entry) {
    return entry.second->destroyed && entry.second->queue.empty();
  });
}

bool SimStreams::allows(const Work& work) const {
  const bool writes = work.kind != Work::Kind::read && work.kind != Work::Kind::to_host;
  const auto needs = writes ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
  return memory_.allows(work.at, work.size, needs) &&
         (work.kind != Work::Kind::copy ||
          memory_.allows(work.from, work.size, CU_MEM_ACCESS_FLAGS_PROT_READ));
}

std::vector<std::uint64_t> SimStreams::mappings_of(const Work& work) const {
  std::vector<std::uint64_t> found = memory_.mappings_of(work.at, work.size);
  if (work.kind == Work::Kind::copy) {
    const auto source = memory_.mappings_of(work.from, work.size);
    found.insert(found.end(), source.begin(), source.end());
  }
  return found;
}

void SimStreams::execute(const Work& work, CUcontext context) {
  // What was mapped at the launch must still be: a kernel does not see that it was replaced.
  const std::vector<std::uint64_t> now = mappings_of(work);
  const auto is_there = [&](std::uint64_t mapping) {
    return std::ranges::find(now, mapping) != now.end();
  };
  if (!allows(work) || !std::ranges::all_of(work.mappings, is_there)) {
    ++illegal_accesses_;
    errors_[context] = CUDA_ERROR_ILLEGAL_ADDRESS;
    return;
  }
  void* const at = reinterpret_cast<void*>(work.at);
  switch (work.kind) {
    case Work::Kind::fill:
      std::memset(at, work.value, work.size);
      break;
    case Work::Kind::copy:
      std::memmove(at, reinterpret_cast<void*>(work.from), work.size);
      break;
    case Work::Kind::to_host:
      std::memmove(work.host, at, work.size);
      break;
    case Work::Kind::from_host:
      std::memmove(at, work.host, work.size);
      break;
    case Work::Kind::read:
      break;
  }
}

CUresult SimStreams::error(CUcontext context) const {
  const auto found = errors_.find(context);
  return found == errors_.end() ? CUDA_SUCCESS : found->second;
}

bool SimStreams::touches(Address at, std::size_t size) const {
  const std::vector<std::uint64_t> mappings = memory_.mappings_of(at, size);
  return is_any([&](const Stream& stream) {
    return std::ranges::any_of(stream.queue, [&](const Item& item) {
      return std::ranges::find_first_of(item.work.mappings, mappings) != item.work.mappings.end();
    });
  });
}

}  // namespace simcuda
