#!/usr/bin/env bash
# coverage.sh: counts the lines of csrc/ that the C++ tests and the quick Python tests execute, by room, and lists
# those that none does. Needs doctest, and gcov of the compiler. A process that a signal ends counts nothing, so the
# reports of faults seem to be executed by none. Tests that fail are check.sh's matter.
source "$(dirname "$0")/lib.sh"

build=build/coverage
environment=$PWD/$build/environment

build() {
  build_aside "$build" "-O0 --coverage -fprofile-update=atomic"
  find $build -name '*.gcda' -delete
}
cpp_tests() {
  ctest --test-dir $build --output-on-failure -j "$JOBS" || true
}
python_tests() {
  VTENSOR_SIMCUDA=$PWD/$build/libsimcuda.so "$environment/bin/python" -m pytest -q -n 2 --dist worksteal \
    -m "not slow and not alone" tests/python || true
}
# A line of a template counts once, however many instances it has.
report() {
  gcovr -r . --filter csrc/ -j "$JOBS" --json $build/lines.json $build/CMakeFiles/{vtensor_core,_core}.dir
  $PYTHON - $build/lines.json <<'END'
import collections, json, sys
rooms = collections.defaultdict(lambda: [0, 0])
for file in sorted(json.load(open(sys.argv[1]))["files"], key=lambda file: file["file"]):
    counts = collections.Counter()
    for line in file["lines"]:
        counts[line["line_number"]] += line["count"]
    missing = [number for number in sorted(counts) if counts[number] == 0]
    room = rooms[file["file"].split("/")[1]]
    room[0] += len(counts)
    room[1] += len(counts) - len(missing)
    if missing:
        print(file["file"], *missing)
rooms["all"] = [sum(numbers) for numbers in zip(*rooms.values())]
for room, (lines, executed) in rooms.items():
    print(f"{room:8} {executed:6} of {lines:6} lines, {executed / lines:.1%}")
END
}

step "Build that counts" build
step "C++ tests" cpp_tests
step "Python tests" python_tests
step "Lines of csrc/" report
