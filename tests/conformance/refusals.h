// Runs an operation with a refusal injected at every driver call that it makes.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include "base/errors.h"
#include "conformance/subject.h"

namespace vtensor::conformance {

// `broken`: a remap was refused, and so was its undoing.
enum class Outcome { done, refused, broken, timed_out };

// Runs `operate` in a fresh scene that `arrange` made, once for every driver call that it makes,
// with that call refused (or that one and all after it), until it makes fewer. `verify` gets how it
// ended. A Scene is a Bench.
template <class T, class Scene>
void refuse_each_call(std::function<void(Scene&)> arrange, std::function<void(Scene&)> operate,
                      std::function<void(Scene&, Outcome)> verify) {
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
        scene.driver->meter().fail_after(skip, refuse);
        try {
          operate(scene);
        } catch (const UndoFailed&) {
          outcome = Outcome::broken;
          CHECK(refuse > 1);  // one refusal can always be undone
        } catch (const TimedOut&) {
          outcome = Outcome::timed_out;
          CHECK(refuse > 1);
        } catch (const DriverError& failure) {
          outcome = Outcome::refused;
          CHECK(failure.code != 0);
          CHECK(std::string(failure.what()).front() == '[');
        }
        scene.driver->meter().disarm();
        reached = scene.calls() - before > skip;
        if (!reached) CHECK(outcome == Outcome::done);
        verify(scene, outcome);
      }
      if (T::is_cuda) CHECK(T::leaks() == "");  // the driver's end gives back what is left
    }
  }
}

}  // namespace vtensor::conformance
