"""A Hypothesis state machine: random programs over a KV cache, compared with a model of its slots.

It checks after every step: each token's K and V in every layer (I2, I6, I7), lengths and slots, the counts of
mapped and needed pages (I4), and the pool's tables (I3 to I6). A step that fails because a driver call was
refused must change nothing (I8). At the end the cache is closed, and nothing may be left (I14).

To test your own code with it, override :meth:`CacheMachine.write` or add rules::

    class WithMyKernel(CacheMachine):
        @precondition(lambda self: self.in_use())
        @rule(index=which)
        def my_kernel(self, index):
            slot = self.slot(index)
            k, v = self.cache[0]
            n = self.cache.length(slot)
            assert torch.equal(my_kernel(k[slot, :n]), my_kernel(self.expected(slot, 0)[0]))

    TestWithMyKernel = WithMyKernel.TestCase  # for pytest or unittest

Needs hypothesis.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

import vtensor
from vtensor.testing import kv_model
from vtensor.testing._checks import check_invariants, fail_after, wake_again
from vtensor.testing.kv_model import MOST_LAYERS, Request

# Imported before hypothesis, because its error says what to do if hypothesis is missing.
from vtensor.testing.strategies import failures, growths, prompts  # isort: split

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

__all__ = ["BUDGET_PAGES", "CacheMachine", "which"]

BUDGET_PAGES = 90
_PAGE_SIZE = 4096
_SLOTS = 6
_SECONDS = 20.0

which = st.integers(0, 99)
"""A strategy for the index of a request, for ``CacheMachine.slot``."""


class CacheMachine(RuleBasedStateMachine):
    """Random programs over the requests of one cache.

    They include prompts with common prefixes, growth, forks, beams, rejected drafts, published prefixes,
    swapping and writes in the middle.

    Attributes:
        options: arguments of :class:`~vtensor.KVCache` for :meth:`open_cache`. Override them to test other
            shapes. With ``"tile": 1`` and no windows, the counts of pages are checked exactly.
        looks_ahead: set it to True if the pool of :meth:`open_pool` has ``prefetch`` above 0. Pages may then
            wait for the mapper, and their counts are bounds.
        pool, cache: the results of :meth:`open_pool` and :meth:`open_cache`.
        requests: the :class:`~vtensor.testing.kv_model.Request` of each slot that is not free.
        deferred: slots that may not be read yet, because the mapper or the next step will map their prefix.
    """

    options: ClassVar[dict[str, Any]] = {
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 32,
        "max_batch": _SLOTS,
        "max_len": 120,
        "tile": 1,
    }
    looks_ahead: ClassVar[bool] = False

    pool: vtensor.Pool
    cache: vtensor.KVCache
    requests: dict[int, Request]
    deferred: set[int]

    # --- to be overridden ---

    def open_pool(self) -> vtensor.Pool:
        """Makes a pool of ``BUDGET_PAGES`` small pages, so that memory is short at times.

        Override it to test another driver or other options. The machine closes the pool.
        """
        return vtensor.Pool("cpu", page_size=_PAGE_SIZE, budget=BUDGET_PAGES * _PAGE_SIZE, prefetch=0)

    def open_cache(self, pool: vtensor.Pool) -> vtensor.KVCache:
        """Makes the cache, of float32 and at most 8 layers. Override it to test a subclass of your own."""
        return vtensor.KVCache(**self.options, dtype=torch.float32, pool=pool)

    def write(self, slot: int, start: int, values: Sequence[int]) -> None:
        """Writes K and V of new tokens in every layer. Override it to test a kernel that writes them.

        Args:
            slot: the slot. Its pages for the new tokens are mapped and not shared.
            start: position of the first token.
            values: one value for each token. :func:`~vtensor.testing.kv_model.expected` returns their K and
                V.
        """
        kv_model.write(self.cache, slot, start, values)

    # --- for rules ---

    def in_use(self) -> list[int]:
        """The slots of requests that are not swapped out."""
        return [slot for slot, request in self.requests.items() if not request.swapped]

    def slot(self, index: int) -> int:
        """One of :meth:`in_use`. There must be at least one."""
        slots = self.in_use()
        return slots[index % len(slots)]

    def expected(self, slot: int, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K and V that a layer must have for the slot's tokens: plain tensors ``[length, heads, head_dim]``.

        V is None in a cache without V. A layer with a window has only the last of the tokens.
        """
        return kv_model.expected(self.cache, layer, self.requests[slot].values)

    def attempt(self, operation: Callable[[], Any], fail: int | None) -> Any:
        """Runs the operation. If a driver call is refused, asserts that nothing changed (I8).

        Args:
            operation: a function without arguments.
            fail: the number of driver calls that pass before one is refused; None refuses none.

        Returns:
            The result of the operation. A refused one runs again: the pool's mapper makes driver calls too,
            so a refusal depends on time, and the same draws must make the same requests.
        """
        before = (self.cache.lengths, self.cache.stats().slots_free)
        try:
            if fail is None:
                return operation()
            with fail_after(self.pool, fail):
                return operation()
        except vtensor.DriverError as error:
            assert fail is not None, error
            assert (self.cache.lengths, self.cache.stats().slots_free) == before
            return operation()

    def grow(self, by: Mapping[int, int], fail: int | None) -> bool:
        """Grows slots by one ``step`` of the cache, up to ``max_len``, and calls :meth:`write` for each slot.

        Args:
            by: tokens to add, by slot in use.
            fail: as for :meth:`attempt`.

        Returns:
            False if memory was short. Nothing has changed then.
        """
        before = self.cache.lengths
        lengths = list(before)
        for slot, n in by.items():
            lengths[slot] = min(self.cache.max_len, lengths[slot] + n)
        fits = self.cache.fits(lengths)
        assert self.cache.lengths == before
        done = self.attempt(lambda: self.cache.step(lengths), fail)
        if not self.looks_ahead:
            assert done == fits
        if not done:
            assert self.cache.lengths == before
            return False
        self.deferred.clear()
        for slot in by:
            request = self.requests[slot]
            values = request.extended(lengths[slot] - before[slot], self.own_values)
            self.write(slot, before[slot], values)
            request.append(values)
        return True

    def offer(self, slot: int, fail: int | None) -> None:
        """Publishes the part of the request's prompt that is in the slot.

        Args:
            slot: a slot in use.
            fail: as for :meth:`attempt`.
        """
        request = self.requests[slot]
        tokens = request.prompt[: request.known]
        try:
            known = self.attempt(lambda: self.cache.publish(slot, tokens, salt=request.salt), fail)
        except vtensor.InvalidArgument:
            assert self.windows
            return
        except vtensor.OutOfPages:  # for pages that the kernel copied and that have no handle yet
            return
        unit = self.cache.stats().unit
        assert known == len(tokens) // unit * unit

    # --- rules ---

    @initialize()
    def begin(self) -> None:
        self.requests = {}
        self.deferred = set()
        self.own_values = kv_model.own_values()
        self.pool = self.open_pool()
        self.cache = self.open_cache(self.pool)
        if self.cache.dtype is not torch.float32 or len(self.cache) > MOST_LAYERS:
            raise vtensor.InvalidArgument(
                f"[CacheMachine] the cache has {len(self.cache)} layers of {self.cache.dtype}: give at most "
                f"{MOST_LAYERS} of torch.float32, in which the tokens' marks are exact"
            )

    @property
    def windows(self) -> Sequence[int | None] | None:
        """The windows among the options."""
        return self.options.get("windows")

    def free_slots(self) -> int:
        """Slots that can be allocated."""
        return self.cache.max_batch - len(self.requests)

    def swapped(self) -> list[int]:
        """The slots of requests that are swapped out."""
        return [slot for slot, request in self.requests.items() if request.swapped]

    @precondition(lambda self: self.free_slots())
    @rule(expect=st.sampled_from([0, 10, 60]), fail=failures(12))
    def alloc(self, expect: int, fail: int | None) -> None:
        slot = self.attempt(lambda: self.cache.alloc(expect=expect), fail)
        assert slot not in self.requests and self.cache.length(slot) == 0
        self.requests[slot] = Request()

    @precondition(lambda self: self.free_slots())
    @rule(
        prompt=prompts(),
        salt=st.sampled_from(["", "", "other"]),
        prefill=st.booleans(),
        deferred=st.booleans(),
        fail=failures(12),
    )
    def alloc_prompt(
        self, prompt: list[int], salt: str, prefill: bool, deferred: bool, fail: int | None
    ) -> None:
        slot = self.attempt(lambda: self.cache.alloc(tokens=prompt, salt=salt, deferred=deferred), fail)
        assert slot not in self.requests
        if deferred and self.looks_ahead:
            self.deferred.add(slot)
        request = self.requests[slot] = Request(salt, prompt)
        covered = self.cache.length(slot)
        assert covered < len(prompt)
        request.append(request.extended(covered, self.own_values))
        if prefill:  # with step() and publish() alone, other requests would rarely find it
            self.grow({slot: len(prompt) - covered}, None)
            self.offer(slot, None)

    @precondition(lambda self: not self.free_slots())
    @rule()
    def alloc_too_many(self) -> None:
        try:
            self.cache.alloc()
        except vtensor.NoFreeSlot:
            return
        raise AssertionError("more requests than slots were admitted")

    @precondition(lambda self: self.in_use())
    @rule(steps=st.lists(growths(), min_size=_SLOTS, max_size=_SLOTS), fail=failures(12))
    def step(self, steps: list[int], fail: int | None) -> None:
        # In the order of requests: their slots depend on the progress of the mapper.
        self.grow({slot: steps[i % len(steps)] for i, slot in enumerate(self.in_use())}, fail)

    @precondition(lambda self: self.in_use())
    @rule(steps=st.lists(growths(), min_size=_SLOTS, max_size=_SLOTS))
    def prepare(self, steps: list[int]) -> None:
        lengths = self.cache.lengths
        for i, slot in enumerate(self.in_use()):
            if self.cache.bands_away(slot):
                continue
            if all(self.cache.length(slot, band) == lengths[slot] for band in range(len(self.cache.bands))):
                lengths[slot] = min(self.cache.max_len, lengths[slot] + steps[i % len(steps)])
        # The pages it gives up depend on those on their way out, and what later steps find on what is mapped.
        self.await_mapper()
        before = self.cache.lengths
        self.cache.prepare(lengths)
        self.await_mapper()
        assert self.cache.lengths == before

    @precondition(lambda self: self.requests)
    @rule(index=which)
    def free(self, index: int, stream: int | None = None) -> None:
        slot = list(self.requests)[index % len(self.requests)]
        self.cache.free(slot, stream=stream)
        del self.requests[slot]
        self.deferred.discard(slot)

    @precondition(lambda self: self.deferred)
    @rule(index=which, fail=failures(12))
    def wait_for_prefix(self, index: int, fail: int | None) -> None:
        slot = sorted(self.deferred)[index % len(self.deferred)]
        self.attempt(lambda: self.cache.wait(slot), fail)
        self.deferred.remove(slot)

    @precondition(lambda self: self.in_use())
    @rule(index=which, percent=st.integers(0, 100))
    def truncate(self, index: int, percent: int, stream: int | None = None) -> None:
        slot = self.slot(index)
        request = self.requests[slot]
        length = len(request.values) * percent // 100
        try:
            self.cache.truncate(slot, length, stream=stream)
        except vtensor.InvalidArgument:
            assert self.windows and length < len(request.values)
        else:
            request.truncate(length)

    @precondition(lambda self: self.in_use() and self.free_slots())
    @rule(index=which, n=st.integers(1, 3), fail=failures(12))
    def fork(self, index: int, n: int, fail: int | None) -> None:
        slot = self.slot(index)
        n = min(n, self.free_slots())
        before, lengths = self.pool.stats(), self.cache.lengths
        try:
            forks = self.attempt(lambda: self.cache.fork(slot, n), fail)
        except vtensor.OutOfPages:  # as for publish
            assert self.cache.lengths == lengths and self.cache.stats().slots_free == self.free_slots()
            return
        assert len(set(forks)) == n and not set(forks) & set(self.requests)
        self.deferred.discard(slot)
        if not self.looks_ahead and before.pages_private == 0 and fail is None:
            assert self.pool.stats().pages_used <= before.pages_used
        for fork in forks:
            self.requests[fork] = self.requests[slot].copy()

    @precondition(lambda self: len(self.in_use()) >= 2)
    @rule(picks=st.lists(which, min_size=2, max_size=_SLOTS))
    def reorder(self, picks: list[int], stream: int | None = None) -> None:
        slots = self.in_use()[: len(picks)]
        sources = [slots[pick % len(slots)] for pick in picks[: len(slots)]]
        held = {slot: self.requests.pop(slot) for slot in slots}
        for slot in self.deferred.intersection(slots):
            self.cache.wait(slot)
            self.deferred.remove(slot)
        for slot, source in zip(self.cache.reorder(slots, sources, stream=stream), sources, strict=True):
            assert slot not in self.requests
            self.requests[slot] = held[source].copy()

    @precondition(lambda self: self.in_use())
    @rule(index=which, fail=failures(12))
    def publish(self, index: int, fail: int | None) -> None:
        self.offer(self.slot(index), fail)

    @precondition(lambda self: self.in_use())
    @rule(n=st.integers(1, 3), fail=failures(12))
    def swap_out(self, n: int, fail: int | None) -> None:
        slots = self.in_use()[-n:]
        self.attempt(lambda: self.cache.swap_out(slots if n > 1 else slots[0]), fail)
        for slot in slots:
            self.cache.wait(slot)  # so that equal steps give equal counts
        self.deferred.difference_update(slots)
        for slot in slots:
            self.requests[slot].swapped = True

    @precondition(lambda self: self.swapped())
    @rule(index=which, n=st.integers(1, 3), fail=failures(12))
    def swap_in(self, index: int, n: int, fail: int | None) -> None:
        first = index % len(self.swapped())
        slots = self.swapped()[first : first + n]
        lengths = self.cache.lengths
        for slot in slots:
            lengths[slot] = self.cache.length(slot)
        fits = self.cache.fits(lengths)
        done = self.attempt(lambda: self.cache.swap_in(slots if n > 1 else slots[0]), fail)
        if not self.looks_ahead:
            assert done == fits
        if not done:
            return
        for slot in slots:
            self.requests[slot].swapped = False
            self.cache.wait(slot)

    @precondition(lambda self: self.in_use() and not self.windows)
    @rule(index=which, percent=st.integers(0, 100), fail=failures(12))
    def overwrite(self, index: int, percent: int, fail: int | None) -> None:
        slot = self.slot(index)
        request = self.requests[slot]
        if not request.values:
            return
        start = (len(request.values) - 1) * percent // 100
        try:
            self.attempt(lambda: self.cache.unshare(slot, start, start + 1), fail)
        except vtensor.OutOfPages:
            return
        request.values[start] = value = next(self.own_values)
        request.known = min(request.known, start)
        self.write(slot, start, [value])

    @rule(fail=failures(12), fail_waking=failures(12))
    def sleep_and_wake(self, fail: int | None, fail_waking: int | None) -> None:
        """Puts the cache to sleep and wakes it. Prefixes that no slot uses are gone then; all else stays."""
        try:
            self.attempt(lambda: self.pool.sleep(contents="host"), fail)
        except vtensor.OutOfPages:
            return  # no pages for what the kernel copied for forks
        wake_again(self.pool, fail_waking)

    # --- after every step ---

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "cache"):
            self.check()

    def check(self) -> None:
        """Compares everything with its model."""
        if not self.looks_ahead:
            self.pool.wait_idle(_SECONDS)
        for slot, request in self.requests.items():
            assert self.cache.length(slot) == len(request.values)
            if not request.swapped and slot not in self.deferred:
                kv_model.check_contents(self.cache, slot, request.values, self.windows)
        check_invariants(self.pool)
        self.check_counts()

    def check_counts(self) -> None:
        """Checks the counts of slots, and of pages by state (I4)."""
        stats = self.cache.stats()
        assert stats.pages_mapped == (
            stats.pages_active + stats.pages_prefetched + stats.pages_cached + stats.pages_pinned
        )
        assert stats.slots_used + stats.slots_swapped == len(self.requests)
        if not self.looks_ahead:
            assert stats.pages_pinned == 0
        if not self.windows and self.options.get("tile") == 1 and not self.deferred:
            assert stats.pages_active == self.needed_pages()

    def await_mapper(self) -> None:
        """Waits until the mapper has nothing left to do. A call that it was refused is no failure."""
        for _ in range(_SLOTS + 2):  # each slot may have an error of its own
            try:
                self.pool.wait_idle(_SECONDS)
                return
            except vtensor.DriverError:
                pass
        raise AssertionError("errors of the mapper are raised again and again")

    def needed_pages(self) -> int:
        """Pages that the lengths need, in a cache with ``tile=1`` and no windows."""
        size = self.pool.page_size
        return sum(
            group.rows * -(-len(self.requests[slot].values) * group.item_bytes // size)
            for group in self.cache._layout.row_groups
            for slot in self.in_use()
        )

    def teardown(self) -> None:
        """Closes the cache and checks that nothing is left (I14)."""
        if not hasattr(self, "cache") or sys.exc_info()[0] is not None:
            return  # the traceback of a failed step keeps its variables alive
        self.cache.close()
        self.pool.wait_idle(_SECONDS)
        self.pool.trim()
        check_invariants(self.pool)
        stats = self.pool.stats()
        assert stats.pages_used == stats.pages_mapped == stats.tensors == 0  # I14
        self.pool.close()
