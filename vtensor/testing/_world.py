"""The state of :class:`~vtensor.testing.machine.TensorMachine`: tensors and views with their models, and
checks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch

import vtensor
from vtensor.testing._checks import check_invariants, fail_after
from vtensor.testing.model import ModelTensor, ModelView, bytes_of, only_of

BUDGET_PAGES = 32
PAGE_SIZES = (4096, 16384)
UNKNOWN_TO_NUMPY = (torch.bfloat16, torch.float8_e4m3fn)
REFUSED = object()
"""What :meth:`World.attempt` returns if the operation was refused."""


class World:
    """Tensors, forks and views of two pools, each with its model.

    Attributes:
        pools: two pools, with pages of ``PAGE_SIZES`` bytes.
        tensors: the open tensors. Each has ``actual`` and ``expected()``.
        views: plain tensors over some of them, and over tensors that are gone.
    """

    pools: list[vtensor.Pool]
    tensors: list[ModelTensor]
    views: list[ModelView]
    families: list[int]
    seed = 0

    def open_pools(self) -> list[vtensor.Pool]:
        """Makes two pools of ``BUDGET_PAGES`` pages each. Override it to test another driver or other
        options.

        If ``prefetch`` is above 0, the counts of pages are not exact: override :meth:`check_counts` too.
        """
        return [
            vtensor.Pool("cpu", page_size=size, budget=BUDGET_PAGES * size, prefetch=0) for size in PAGE_SIZES
        ]

    def seeded(self) -> int:
        self.seed += 1
        return self.seed

    def tensor(self, index: int) -> ModelTensor:
        """One of the tensors. There must be at least one."""
        return self.tensors[index % len(self.tensors)]

    def new_family(self) -> int:
        family = self.families.pop(0)
        self.families.append(family)
        return family

    def positions(self, t: ModelTensor, amount: tuple[str, int]) -> int:
        """The number of positions that an amount stands for in this tensor now."""
        name, count = amount
        per_page = max(1, t.memory.page_size // t.memory.item_bytes)
        end = t.memory.phase + (t.front + t.length) * t.memory.item_bytes
        to_page_end = -end % t.memory.page_size // t.memory.item_bytes
        return {
            "none": 0,
            "one": 1,
            "few": count,
            "fill": to_page_end,
            "over": to_page_end + 1,
            "pages": count * per_page // 2 + count,
            "rest": t.room,
            "beyond": t.room + count,
        }[name]

    def facts(self, pool: vtensor.Pool) -> tuple[tuple[int, ...], list[Any]]:
        """The state that a refused operation must not change."""
        stats = pool.stats()
        counts = (
            stats.pages_used,
            stats.pages_free,
            stats.pages_over,
            stats.pages_mapped,
            stats.pages_active,
            stats.pages_pinned,
            stats.nbytes_reserved,
            stats.tensors,
        )
        return counts, [
            (t.serial, t.actual.length, t.actual.capacity, t.actual.address, t.actual.shape, t.actual.closed)
            for t in self.tensors
        ]

    def attempt(self, pool: vtensor.Pool, operation: Callable[[], Any], fail: int | None) -> Any:
        """Runs the operation. If a driver call is refused or pages are short, asserts that nothing changed
        (I8)."""
        before, private = self.facts(pool), pool.stats().pages_private
        try:
            if fail is None:
                return operation()
            with fail_after(pool, fail):
                result = operation()
            pool.wait_idle(timeout=5)  # gives back pages that the refused call left mapped (I4)
            return result
        except vtensor.DriverError as error:
            assert fail is not None, error
        except vtensor.OutOfPages as error:
            assert "page" in str(error)
        after = self.facts(pool)
        if pool.stats().pages_private != private:
            # The operation folded private copies first, which may free a page without other users.
            assert after[0][0] <= before[0][0] and after[0][2:] == before[0][2:]
            before = (after[0], before[1])
        assert after == before
        return REFUSED

    def mapped_slots(self, t: ModelTensor) -> set[int]:
        mapped = t.slots()
        for view in self.views:
            if view.memory is t.memory:
                mapped |= view.slots
        return mapped

    def look_at_new(self, t: ModelTensor, start: int, written: torch.Tensor | None) -> None:
        """Checks that new positions show no other owner's bytes (I7), and copies them to the model."""
        fresh = t.actual.narrow(t.grow_dim, start, t.length - start)
        data = bytes_of(fresh).reshape(t.rows, t.length - start, t.memory.item_bytes)
        if written is not None:
            assert torch.equal(data, written)
        elif t.zeroed:
            assert not data.any()
        else:
            assert only_of(data, t.families), "new positions show another owner's bytes"
        begin, end = t.front + start, t.front + t.length
        t.memory.make_room(end)
        for view in self.views:
            if view.memory is t.memory and not t.zeroed and written is None:  # the bytes under a view stay
                a, b = max(view.start, begin), min(view.stop, end)
                if a < b:
                    assert torch.equal(data[:, a - begin : b - begin], t.memory.cells[:, a:b])
        t.memory.cells[:, begin:end] = data

    def leave(self, t: ModelTensor) -> None:
        """Records that the tensor has moved to other memory. Its views stay on the old one."""
        t.memory = t.memory.copy(start=t.front)
        t.front = 0

    def settle_address(self, t: ModelTensor) -> None:
        t.base = t.actual.address - t.front * t.memory.item_bytes
        t.row_stride = self.row_stride_of(t)
        assert (t.base - t.memory.phase) % t.memory.page_size == 0

    def row_stride_of(self, t: ModelTensor) -> int:
        if not t.shape_before:
            return 0
        return t.actual.stride(t.grow_dim - 1) * t.dtype.itemsize

    def grow(
        self,
        t: ModelTensor,
        n: int,
        operation: Callable[[], Any],
        fail: int | None,
        written: torch.Tensor | None = None,
    ) -> None:
        """Grows by `n` positions with the bytes `written`, or with positions that are not written yet."""
        copies = self.may_need_copies(t, n)
        before = t.length
        wanted = t.memory.slots(t.front, t.front + t.length + n)
        moves = t.move and t.front + t.length + n > t.capacity
        missing = 0 if moves else len(wanted - self.mapped_slots(t)) * t.rows
        stats = t.pool.stats()
        free = stats.pages_free - stats.pages_over
        if n > t.room:
            facts = self.facts(t.pool)
            self.must_exceed(operation)
            assert self.facts(t.pool) == facts
            return
        result = self.attempt(t.pool, operation, fail)
        if result is REFUSED:
            if fail is None and not moves:
                assert missing + copies > free, "refused though there were pages"
            return
        assert result is t.actual
        # Folding a private copy may free the page that both sides shared.
        assert missing <= free + stats.pages_private, "granted though there were no pages"
        if moves:
            self.leave(t)
            self.settle_address(t)
        t.length = before + n
        self.look_at_new(t, before, written)

    def must_exceed(self, operation: Callable[[], Any]) -> None:
        """Asserts that the operation raises CapacityExceeded."""
        try:
            operation()
        except vtensor.CapacityExceeded:
            return
        raise AssertionError("more positions than the capacity were granted")

    def may_need_copies(self, t: ModelTensor, n: int) -> int:
        """The most pages that growth by `n` may copy: mapped pages that also hold new positions."""
        if n == 0:
            return 0
        new = t.memory.slots(t.front + t.length, t.front + t.length + n)
        return len(new & self.mapped_slots(t)) * t.rows

    def may_unshare(self, pool: vtensor.Pool, pages: int) -> bool:
        """Whether the budget has room for the pages that a write may copy. The kernel copies them unasked."""
        return pool.stats().pages_free >= pages

    def shared_pages(self, t: ModelTensor) -> int:
        return sum(record.shared > 1 for record in t.actual.pages())

    def write(self, x: torch.Tensor, data: torch.Tensor, t: ModelTensor, way: str) -> None:
        """Writes the bytes `data` [rows, n, item] into `x` with one of torch's functions."""
        typed = t.typed(data)
        if way == "numpy" and t.dtype not in UNKNOWN_TO_NUMPY:
            x.numpy()[...] = typed.numpy()
        elif way == "setitem":
            x[...] = typed
        elif way == "out" and t.dtype is not torch.float8_e4m3fn:
            torch.index_select(typed, t.grow_dim, torch.arange(typed.shape[t.grow_dim]), out=x)
        else:
            x.copy_(typed)

    def attempt_close(self, t: ModelTensor, close: Callable[[], None], fail: int | None) -> None:
        """Closes the tensor, which always succeeds. Pages that a refused call leaves mapped go later."""
        if fail is None:
            close()
        else:
            with fail_after(t.pool, fail):
                close()
            t.pool.wait_idle(timeout=5)

    # --- after every step ---

    def check(self) -> None:
        """Compares everything with its model."""
        if not hasattr(self, "pools"):
            return
        for t in self.tensors:
            actual = t.actual
            assert (actual.length, actual.capacity, actual.closed) == (t.length, t.capacity, False)
            assert actual.shape == t.shape() and actual.dtype is t.dtype
            expected = t.base + t.front * t.memory.item_bytes
            assert actual.address == expected  # I1
            if t.length:
                assert actual.data_ptr() == expected
                assert t.rows == 1 or self.row_stride_of(t) == t.row_stride
            assert torch.equal(bytes_of(actual), t.window().reshape(-1)), "contents changed"  # I2, I6
        for view in self.views:
            assert torch.equal(bytes_of(view.actual), view.window().reshape(-1)), "a view changed"  # I3
        for pool in self.pools:
            self.check_counts(pool)

    def needed_and_held(self, pool: vtensor.Pool) -> tuple[int, int]:
        """Pages that the lengths of the pool's tensors need, and those that only views hold."""
        memories = {id(t.memory): t.memory for t in self.tensors if t.pool is pool}
        memories |= {id(v.memory): v.memory for v in self.views if v.pool is pool}
        needed = held = 0
        for memory in memories.values():
            slots: set[int] = set()
            for t in self.tensors:
                if t.memory is memory:
                    slots = t.slots()
                    needed += len(slots) * memory.rows
            covered = {slot for view in self.views if view.memory is memory for slot in view.slots}
            held += len(covered - slots) * memory.rows
        return needed, held

    def check_counts(self, pool: vtensor.Pool) -> None:
        stats = pool.stats()
        needed, held = self.needed_and_held(pool)
        assert stats.pages_active == needed  # I4
        assert stats.pages_pinned == held, (stats.pages_pinned, held)
        assert (stats.pages_prefetched, stats.pages_cached) == (0, 0)
        assert stats.pages_mapped == needed + held
        assert stats.nbytes_mapped == stats.pages_mapped * pool.page_size
        assert stats.pages_used + stats.pages_over - stats.pages_private <= stats.pages_mapped
        assert stats.pages_used + stats.pages_free == stats.budget // stats.page_size  # I5
        assert stats.pages_free >= 0 and 0 <= stats.pages_over <= stats.pages_private
        assert stats.tensors == sum(t.pool is pool for t in self.tensors)
        check_invariants(pool)  # I5

    def come_to_rest(self, pool: vtensor.Pool) -> None:
        """Called before the final check. Pools without look-ahead give everything back at once."""

    def teardown(self) -> None:
        if not hasattr(self, "pools") or sys.exc_info()[0] is not None:
            return  # the traceback of a failed step keeps its variables alive
        for t in self.tensors[::2]:
            t.actual.close()
        self.tensors.clear()
        self.views.clear()
        gc.collect()
        for pool in self.pools:
            self.come_to_rest(pool)
            stats = pool.stats()
            left = (stats.pages_used, stats.pages_mapped, stats.nbytes_reserved, stats.tensors)
            assert left == (0, 0, 0, 0)  # I14
            pool.close()
