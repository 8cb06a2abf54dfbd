#include "vmm/shared_budget.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <mutex>
#include <thread>

#include "base/align.h"
#include "base/errors.h"
#include "base/process.h"

namespace vtensor {

using std::chrono::steady_clock;
using Place = BudgetFile::Place;

namespace {

constexpr std::chrono::nanoseconds kFreeDead = std::chrono::milliseconds(100);
constexpr std::chrono::nanoseconds kLook = std::chrono::milliseconds(1);

std::string quoted(const std::string& name) { return "\"" + name + "\""; }

std::string command_of_process() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string command{std::istreambuf_iterator<char>(file), {}};
  std::replace(command.begin(), command.end(), '\0', ' ');
  command.erase(command.find_last_not_of(' ') + 1);
  return command;
}

}  // namespace

std::unique_ptr<SharedBudget> SharedBudget::join(CallMeter& meter, const std::string& name,
                                                 std::uint64_t limit, Device device) {
  refuse_in_forked_child("Pool");
  if (!BudgetFile::is_name(name)) {
    throw InvalidArgument("[Pool] ", quoted(name), " cannot name a shared budget: give 1 to ",
                          BudgetFile::kLongestName,
                          " letters, digits, dots, dashes and underscores");
  }
  for (;;) {
    std::unique_ptr<BudgetFile> file = BudgetFile::open(meter, name, /*make=*/true);
    const BudgetFile::Lock locked(*file);
    if (!file->linked()) continue;  // its last pool has left meanwhile
    try {
      const std::size_t place = take_place(*file, limit, device);
      return std::unique_ptr<SharedBudget>(new SharedBudget(std::move(file), place, limit));
    } catch (...) {
      if (!file->any_alive()) file->unlink();
      throw;
    }
  }
}

// Requires: locked.
std::size_t SharedBudget::take_place(BudgetFile& file, std::uint64_t limit, Device device) {
  if (!file.any_alive()) {
    file.begin(limit);
  } else if (const std::uint32_t layout = file.layout();
             layout != 0 && layout != BudgetFile::kLayout) {
    throw Error("[Pool] the shared budget ", quoted(file.name()),
                " is kept by another version of vtensor, in layout ", layout,
                " where this one has ", BudgetFile::kLayout, ": use one version, or another name");
  } else {
    file.map();
  }
  BudgetFile::Content& content = file.require_whole();
  if (content.limit != limit) {
    throw InvalidArgument("[Pool] a budget of ", limit, " bytes was asked for, the shared budget ",
                          quoted(file.name()), " has ", content.limit,
                          ": give all its pools one budget, or use another name");
  }
  std::size_t place = 0;
  while (place < kMostPools && file.alive(place)) ++place;
  if (place == kMostPools) {
    throw Error("[Pool] the shared budget ", quoted(file.name()), " has ", kMostPools,
                " pools, and room for no more: close some, or use another name");
  }
  file.enter(place);
  Place& own = content.places[place];
  own.taken = 0;
  own.held = own.cached = own.spare = own.wanted = 0;
  own.answered = content.last_request.load();
  own.process = getpid();
  own.device_type = device.type;
  own.device_index = device.index;
  own.command.fill(0);
  command_of_process().copy(own.command.data(), own.command.size() - 1);
  own.taken = 1;
  return place;
}

SharedBudget::~SharedBudget() {
  Place& place = own();
  place.held = place.wanted = 0;
  place.taken = 0;
  try {
    // The meter may have ended.
    const BudgetFile::Lock locked(*file_, BudgetFile::Lock::Counted::no);
    file_->leave(place_);  // so that of two that leave one is last
    if (!file_->any_alive() && file_->linked()) file_->unlink();
  } catch (...) {
    // The file stays, and the next pool of its name finds no living pool in it.
  }
}

template <typename Sum>
std::uint64_t SharedBudget::sum_elsewhere(const BudgetFile::Content& content, Sum sum) const {
  std::uint64_t bytes = 0;
  const auto& places = content.places;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (i != place_ && places[i].taken != 0) bytes += sum(places[i], i);
  }
  return bytes;
}

std::uint64_t SharedBudget::held_elsewhere(const BudgetFile::Content& content) const {
  return sum_elsewhere(content, [](const Place& place, std::size_t) { return place.held.load(); });
}

std::uint64_t SharedBudget::held_elsewhere() const { return held_elsewhere(file_->content()); }

std::uint64_t SharedBudget::spared_elsewhere() const {
  return sum_elsewhere(file_->content(), [](const Place& place, std::size_t) {
    return std::min(place.held.load(), place.cached.load() + place.spare.load());
  });
}

std::uint64_t SharedBudget::wanted_elsewhere() const {
  return sum_elsewhere(file_->content(), [this](const Place& place, std::size_t i) {
    const std::uint64_t wanted = place.wanted;
    return wanted != 0 && file_->alive(i) ? wanted : 0;
  });
}

// What the limit leaves, with what dead processes held.
std::uint64_t SharedBudget::left() const { return sub_sat(limit(), held() + held_elsewhere()); }

std::uint64_t SharedBudget::room() {
  free_dead_places();
  return left();
}

std::uint64_t SharedBudget::missing_elsewhere() const {
  const std::uint64_t wanted = wanted_elsewhere();
  return wanted == 0 ? 0 : sub_sat(wanted, left());
}

void SharedBudget::free_dead_places() {
  const auto now = steady_clock::now();
  if (now < free_dead_at_) return;
  free_dead_at_ = now + kFreeDead;
  if (const BudgetFile::Lock locked(*file_, std::try_to_lock); locked) free_dead();
}

// Whether there were any. Requires: locked, so that no pool is about to take a place.
bool SharedBudget::free_dead() {
  bool any = false;
  auto& places = file_->content().places;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (i == place_ || places[i].taken == 0 || file_->alive(i)) continue;
    places[i].held = places[i].wanted = 0;
    places[i].taken = 0;
    any = true;
  }
  return any;
}

bool SharedBudget::charge(std::uint64_t bytes) {
  const BudgetFile::Lock locked(*file_);
  BudgetFile::Content& content = file_->require_whole();
  const auto fits = [&] {
    const std::uint64_t all = held() + held_elsewhere(content);
    return all <= limit() && bytes <= limit() - all;
  };
  if (!fits() && !(free_dead() && fits())) return false;
  content.places[place_].held = held_ += bytes;
  return true;
}

SharedBudget::Surveys SharedBudget::survey(std::chrono::nanoseconds patience) {
  refuse_in_forked_child("shared budgets");
  CallMeter meter;
  const auto until = steady_clock::now() + patience;
  Surveys surveys;
  std::vector<std::unique_ptr<BudgetFile>> all;
  for (const std::string& name : BudgetFile::names()) {
    try {
      std::unique_ptr<BudgetFile> file = BudgetFile::open(meter, name, /*make=*/false);
      if (!file || !file->any_alive()) continue;
      {
        const BudgetFile::Lock locked(*file);  // no process begins it meanwhile
        if (!file->any_alive()) continue;
        if (const std::uint32_t layout = file->layout();
            layout != 0 && layout != BudgetFile::kLayout) {
          continue;
        }
        file->map();
        file->require_whole();
      }
      all.push_back(std::move(file));
    } catch (const Error& error) {
      surveys.skipped.emplace_back(error.what());
    }
  }
  std::vector<std::uint32_t> requests;
  for (const std::unique_ptr<BudgetFile>& file : all) requests.push_back(file->request());
  for (std::size_t n = 0; n < all.size(); ++n) {
    BudgetFile& file = *all[n];
    while (!file.answered(requests[n]) && steady_clock::now() < until)
      std::this_thread::sleep_for(kLook);
    try {
      const BudgetFile::Lock locked(file);
      const BudgetFile::Content& content = file.content();
      Survey survey{file.name(), content.limit, {}};
      for (std::size_t i = 0; i < kMostPools; ++i) {
        const Place& place = content.places[i];
        if (place.taken == 0 || !file.alive(i)) continue;
        survey.holders.push_back({place.process,
                                  {place.device_type, place.device_index},
                                  place.command.data(),
                                  {place.held, place.cached, place.spare}});
      }
      if (!survey.holders.empty()) surveys.budgets.push_back(std::move(survey));
    } catch (const Error& error) {
      surveys.skipped.emplace_back(error.what());
    }
  }
  return surveys;
}

}  // namespace vtensor
