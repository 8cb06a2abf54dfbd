// Runs an operation with a refusal injected at every driver call that it makes.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "base/errors.h"
#include "conformance/subject.h"

namespace vtensor::conformance {

enum class Outcome { done, unchanged, stuck, timed_out };

// Runs `operate` in a fresh scene that `arrange` made, once for every driver call that it makes,
// with that call refused (or that one and all after it), until it makes fewer. `verify` gets how it
// ended. A Scene is a Bench with kPages, the number of pages that are operated on.
template <class T, class Scene>
void refuse_each_call(
    std::function<void(Scene&)> arrange, std::function<void(Scene&)> operate,
    std::function<void(Scene&, Outcome, const std::vector<std::size_t>&)> verify) {
  constexpr std::uint64_t kForEver = std::numeric_limits<std::uint64_t>::max() / 2;
  for (const std::uint64_t refuse : {std::uint64_t{1}, std::uint64_t{2}, kForEver}) {
    bool reached = true;
    for (std::uint64_t skip = 0; reached; ++skip) {
      REQUIRE(skip < 100);
      CAPTURE(skip);
      CAPTURE(refuse);
      {
        Scene scene;
        arrange(scene);
        const std::uint64_t before = scene.calls();
        Outcome outcome = Outcome::done;
        std::vector<std::size_t> stuck;
        scene.driver->meter().fail_after(skip, refuse);
        try {
          operate(scene);
        } catch (const UndoFailed& failure) {
          outcome = Outcome::stuck;
          stuck = failure.stuck;
        } catch (const TimedOut&) {
          outcome = Outcome::timed_out;
          CHECK(refuse > 1);
        } catch (const DriverError& failure) {
          outcome = Outcome::unchanged;
          CHECK(failure.code != 0);
          CHECK(std::string(failure.what()).front() == '[');
        }
        scene.driver->meter().disarm();
        reached = scene.calls() - before > skip;
        if (!reached) CHECK(outcome == Outcome::done);
        if (outcome == Outcome::stuck) {
          CHECK(refuse > 1);  // one refusal can always be undone
          CHECK_FALSE(stuck.empty());
          CHECK(std::ranges::all_of(stuck, [](std::size_t i) { return i < Scene::kPages; }));
        }
        verify(scene, outcome, stuck);
      }
      if (T::is_cuda) CHECK(T::leaks() == "");  // whatever is stuck, the driver's end gives it back
    }
  }
}

}  // namespace vtensor::conformance
