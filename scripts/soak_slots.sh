#!/usr/bin/env bash
# soak_slots.sh [OPERATIONS]: random operations (by default ten million) on the slots of a KV cache that is short of
# memory, against a plain model: no page or handle may be lost. Takes minutes; not a part of `make check`.
source "$(dirname "$0")/lib.sh"

build() {
  cmake -S . -B build/soak -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release -DVTENSOR_BUILD_PYTHON=OFF \
    -DVTENSOR_BUILD_TESTS=ON
  cmake --build build/soak --target test_slot_cache_random
}

step "Build" build
step "Soak" env VTENSOR_OPERATIONS="${1:-10000000}" build/soak/test_slot_cache_random --no-version --duration
