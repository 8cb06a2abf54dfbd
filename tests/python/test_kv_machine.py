"""Random programs over a KVCache beside a plain model: every token's K and V say whose they are (I2, I6, I7),
counts are exact (I4, I5), and what is refused or short of memory changes nothing (I8, I9)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import vtensor
from kv_support import MAX_BATCH, MAX_LEN, PAGE, SHAPES, check_contents, make_cache, value_of, write
from support import open_pool, simcuda_library
from vtensor import testing

BUDGET_PAGES = 90
# Prompts that begin alike, so that prefixes are found, and found in part.
PROMPTS = [[7] * 40, [7] * 33 + [8] * 20, [7] * 16 + [9] * 70, list(range(60))]

failing = st.one_of(st.none(), st.none(), st.integers(0, 12))
growth = st.sampled_from([0, 1, 1, 1, 2, 5, 17, 40])


class Request:
    def __init__(self, number: int, salt: str = "", prompt: list[int] | None = None) -> None:
        self.number, self.salt, self.prompt = number, salt, prompt or []
        self.values: list[int] = []
        self.known = 0  # of the prompt: tokens whose values are those of the prompt
        self.swapped = False

    def extended(self, n: int) -> list[int]:
        """Values of the next n tokens: those of the prompt, and then the request's own."""
        values = []
        for at in range(len(self.values), len(self.values) + n):
            if at < len(self.prompt) and at == self.known + len(values):
                values.append(value_of(self.salt, self.prompt[: at + 1]))
            else:
                values.append((self.number * MAX_LEN + at) & 0xFFFFF | 0x80000)
        return values

    def append(self, values: list[int]) -> None:
        begin = len(self.values)
        self.values = self.values + values
        if self.known == begin:
            self.known = min(len(self.prompt), len(self.values))

    def truncate(self, length: int) -> None:
        self.values = self.values[:length]
        self.known = min(self.known, length)

    def copy(self, number: int) -> Request:
        other = Request(number, self.salt, self.prompt)
        other.values, other.known = list(self.values), self.known
        return other


class CacheMachine(RuleBasedStateMachine):
    kind = "host"
    shape = "layers"
    options: dict = {}
    ahead = 0

    @initialize()
    def begin(self):
        self.pool = open_pool(self.kind, BUDGET_PAGES, page_size=PAGE, ahead=self.ahead)
        self.cache = make_cache(self.pool, self.shape, **self.options)
        self.windows = SHAPES[self.shape].get("windows")
        self.requests: dict[int, Request] = {}
        self.made = 0

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        self.cache.close()
        self.pool.wait_idle(20)
        self.pool.trim()
        testing.check_invariants(self.pool)
        stats = self.pool.stats()
        assert stats.pages_used == stats.pages_quarantined == stats.pages_mapped == stats.tensors == 0  # I14
        self.pool.close()

    def new(self, salt="", prompt=None) -> Request:
        self.made += 1
        return Request(self.made, salt, prompt)

    def attempt(self, operation, fail):
        """The operation's result; None where it was refused as asked, and then nothing has changed."""
        before = (self.cache.lengths, self.cache.stats().slots_free)
        try:
            if fail is None:
                return operation()
            with testing.fail_after(self.pool, fail):
                return operation()
        except vtensor.DriverError:
            assert fail is not None
            assert (self.cache.lengths, self.cache.stats().slots_free) == before
            return None

    def here(self, n=1):
        return [slot for slot, request in self.requests.items() if not request.swapped][-n:]

    def free_slots(self):
        return MAX_BATCH - len(self.requests)

    @precondition(lambda self: self.free_slots())
    @rule(expect=st.sampled_from([0, 10, 60]), fail=failing)
    def alloc(self, expect, fail):
        slot = self.attempt(lambda: self.cache.alloc(expect=expect), fail)
        if slot is not None:
            assert slot not in self.requests and self.cache.length(slot) == 0
            self.requests[slot] = self.new()

    @precondition(lambda self: self.free_slots())
    @rule(prompt=st.sampled_from(PROMPTS), salt=st.sampled_from(["", "", "other"]), fail=failing)
    def alloc_prompt(self, prompt, salt, fail):
        slot = self.attempt(lambda: self.cache.alloc(tokens=prompt, salt=salt), fail)
        if slot is None:
            return
        assert slot not in self.requests
        request = self.requests[slot] = self.new(salt, prompt)
        covered = self.cache.length(slot)
        assert covered < len(prompt)
        request.append(request.extended(covered))

    @precondition(lambda self: not self.free_slots())
    @rule()
    def alloc_too_many(self):
        with pytest.raises(vtensor.NoFreeSlot):
            self.cache.alloc()

    @precondition(lambda self: self.here())
    @rule(steps=st.lists(growth, min_size=MAX_BATCH, max_size=MAX_BATCH), fail=failing)
    def step(self, steps, fail):
        slots = self.here(MAX_BATCH)
        lengths = self.cache.lengths
        for slot in slots:
            lengths[slot] = min(MAX_LEN, lengths[slot] + steps[slot])
        before = self.cache.lengths
        done = self.attempt(lambda: self.cache.step(lengths), fail)
        if not done:
            assert self.cache.lengths == before
            return
        for slot in slots:
            request = self.requests[slot]
            values = request.extended(lengths[slot] - before[slot])
            write(self.cache, slot, before[slot], values)
            request.append(values)

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 99))
    def free(self, pick):
        slot = list(self.requests)[pick % len(self.requests)]
        self.cache.free(slot)
        del self.requests[slot]

    @precondition(lambda self: self.here())
    @rule(pick=st.integers(0, 99), part=st.integers(0, 100))
    def truncate(self, pick, part):
        slot = self.here(MAX_BATCH)[pick % len(self.here(MAX_BATCH))]
        request = self.requests[slot]
        length = len(request.values) * part // 100
        try:
            self.cache.truncate(slot, length)
        except vtensor.InvalidArgument:
            assert self.windows and length < len(request.values)
        else:
            request.truncate(length)

    @precondition(lambda self: self.here() and self.free_slots())
    @rule(pick=st.integers(0, 99), n=st.integers(1, 3), fail=failing)
    def fork(self, pick, n, fail):
        slot = self.here(MAX_BATCH)[pick % len(self.here(MAX_BATCH))]
        n = min(n, self.free_slots())
        used = self.pool.stats().pages_used
        parted = self.pool.stats().pages_parted
        forks = self.attempt(lambda: self.cache.fork(slot, n), fail)
        if forks is None:
            return
        assert len(set(forks)) == n and not set(forks) & set(self.requests)
        if self.ahead == 0 and parted == 0 and fail is None:
            assert self.pool.stats().pages_used <= used
        for fork in forks:
            self.made += 1
            self.requests[fork] = self.requests[slot].copy(self.made)

    @precondition(lambda self: len(self.here(2)) == 2)
    @rule(picks=st.lists(st.integers(0, 99), min_size=2, max_size=MAX_BATCH))
    def reorder(self, picks):
        slots = self.here(MAX_BATCH)[: len(picks)]
        sources = [slots[pick % len(slots)] for pick in picks[: len(slots)]]
        held = {slot: self.requests.pop(slot) for slot in slots}
        for slot, source in zip(self.cache.reorder(slots, sources), sources, strict=True):
            assert slot not in self.requests
            self.made += 1
            self.requests[slot] = held[source].copy(self.made)

    @precondition(lambda self: self.here())
    @rule(pick=st.integers(0, 99), fail=failing)
    def publish(self, pick, fail):
        slot = self.here(MAX_BATCH)[pick % len(self.here(MAX_BATCH))]
        request = self.requests[slot]
        tokens = request.prompt[: request.known]
        try:
            known = self.attempt(lambda: self.cache.publish(slot, tokens, salt=request.salt), fail)
        except vtensor.InvalidArgument:
            assert self.windows
            return
        assert known is None or known == len(tokens) // self.cache.stats().unit * self.cache.stats().unit

    @precondition(lambda self: self.here())
    @rule(n=st.integers(1, 3))
    def swap_out(self, n):
        slots = self.here(n)
        self.cache.swap_out(slots if n > 1 else slots[0])
        for slot in slots:
            self.cache.wait(slot)  # so that the same steps give the same counts
        for slot in slots:
            self.requests[slot].swapped = True

    def away(self):
        return [slot for slot, request in self.requests.items() if request.swapped]

    @precondition(lambda self: self.away())
    @rule(pick=st.integers(0, 99), fail=failing)
    def swap_in(self, pick, fail):
        slot = self.away()[pick % len(self.away())]
        if self.attempt(lambda: self.cache.swap_in(slot), fail):
            self.requests[slot].swapped = False
            self.cache.wait(slot)

    @precondition(lambda self: self.here())
    @rule(pick=st.integers(0, 99), at=st.integers(0, 100), fail=failing)
    def overwrite(self, pick, at, fail):
        slot = self.here(MAX_BATCH)[pick % len(self.here(MAX_BATCH))]
        request = self.requests[slot]
        if not request.values or self.windows:
            return
        start = (len(request.values) - 1) * at // 100
        try:
            if self.attempt(lambda: self.cache.own(slot, start, start + 1) or True, fail) is None:
                return
        except vtensor.OutOfPages:
            return
        request.values[start] = value = self.made << 8 & 0xFFFFF | 0x80000 | start
        request.known = min(request.known, start)
        write(self.cache, slot, start, [value])

    @invariant()
    def contents_and_counts(self):
        if not hasattr(self, "pool"):
            return
        if self.ahead == 0:
            self.pool.wait_idle(20)
        for slot, request in self.requests.items():
            assert self.cache.length(slot) == len(request.values)
            if not request.swapped:
                check_contents(self.cache, slot, request.values, self.windows)
        testing.check_invariants(self.pool)
        stats = self.cache.stats()
        assert stats.pages_mapped == (
            stats.pages_needed + stats.pages_ahead + stats.pages_parked + stats.pages_held
        )
        assert stats.slots_used + stats.slots_swapped == len(self.requests)
        if self.ahead == 0:
            assert stats.pages_held == 0
        if not self.windows and stats.page_tokens * 4 <= PAGE and "tile" not in SHAPES[self.shape]:
            assert stats.pages_needed == self.needed()

    def needed(self) -> int:
        pages = 0
        for kind in self.cache._layout.kinds:
            for request in self.requests.values():
                if not request.swapped:
                    pages += kind.rows * -(-len(request.values) * kind.item_bytes // PAGE)
        return pages


def case(kind: str, shape: str, ahead: int = 0, **options):
    name = "".join(word.title() for word in f"{kind} {shape} {'mapper' if ahead else ''}".split())
    machine = type(name, (CacheMachine,), {"kind": kind, "shape": shape, "ahead": ahead, "options": options})
    test = machine.TestCase
    test.settings = settings(max_examples=12, stateful_step_count=40)
    return pytest.mark.skipif(
        kind == "simcuda" and simcuda_library() is None, reason="libsimcuda.so is not built"
    )(test)


for _kind in ("host", "simcuda"):
    for _shape in SHAPES:
        globals()[f"Test{_kind}{_shape}".replace(" ", "_")] = case(_kind, _shape)
    globals()[f"Test{_kind}mapper"] = case(_kind, "sliced", ahead=8 * PAGE, lookahead=20)
