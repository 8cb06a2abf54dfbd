"""A Hypothesis state machine: random programs over tensors that grow, compared with a model.

It checks after every step: addresses (I1), contents of tensors and views bit for bit (I2, I3, I6), the counts
of mapped, active and pinned pages (I4), budget and reference counts (I5), and that new positions show no
other owner's bytes (I7). A step that fails because a driver call was refused or pages are short must change
nothing (I8, I9). At the end everything is closed, and nothing may be left (I14).

To test your own code with it, add rules::

    class WithMyKernel(TensorMachine):
        @precondition(lambda self: self.tensors)
        @rule(index=which)
        def my_kernel(self, index):
            t = self.tensor(index)
            assert torch.equal(my_kernel(t.actual), my_kernel(t.expected()))

    TestWithMyKernel = WithMyKernel.TestCase  # for pytest or unittest

Needs hypothesis. Testing stateful systems against a model comes from Claessen and Hughes, "QuickCheck" (ICFP
2000) and its successors.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

import vtensor
from vtensor.testing._checks import check_invariants, fail_after, wake_again
from vtensor.testing.model import FAMILIES, Memory, ModelTensor, ModelView, bytes_of, family_bytes, only_of

# Imported before hypothesis, because its error says what to do if hypothesis is missing.
from vtensor.testing.strategies import Amount, Layout, amounts, failures, layouts  # isort: split

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

__all__ = ["BUDGET_PAGES", "PAGE_SIZES", "REFUSED", "TensorMachine", "which"]

BUDGET_PAGES = 32
PAGE_SIZES = (4096, 16384)
UNKNOWN_TO_NUMPY = (torch.bfloat16, torch.float8_e4m3fn)
REFUSED = object()
"""What :meth:`TensorMachine.attempt` returns if the operation was refused."""

MOST_TENSORS = 6
MOST_VIEWS = 6

which = st.integers(0, 11)
"""A strategy for the index of a tensor or a view, for ``TensorMachine.tensor``."""


class TensorMachine(RuleBasedStateMachine):
    """Random programs over the tensors, forks and views of two pools, each with its model.

    A rule of your own gets a tensor by ``self.tensor(index)``. Override ``open_pools()`` to test other pools.

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
        elif t.zeroed or not t.dropped:
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
        before = t.length
        copies = self.may_need_copies(t, n)
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
        new = t.memory.slots(t.front + t.length, t.front + t.length + n)
        return len(new & self.mapped_slots(t)) * t.rows

    def may_unshare(self, pool: vtensor.Pool, pages: int) -> bool:
        """Whether the budget has room for the pages that a write may copy. The kernel copies them unasked."""
        return pool.stats().pages_free >= pages

    def write(self, x: torch.Tensor, data: torch.Tensor, way: str) -> None:
        """Writes the bytes `data` [rows, n, item] into `x` with one of torch's functions."""
        typed = data.reshape(-1).view(x.dtype).reshape(x.shape)
        if way == "numpy" and x.dtype not in UNKNOWN_TO_NUMPY:
            x.numpy()[...] = typed.numpy()
        elif way == "setitem":
            x[...] = typed
        elif way == "out" and x.dtype is not torch.float8_e4m3fn:
            torch.index_select(typed, 0, torch.arange(typed.shape[0], device="cpu"), out=x)
        else:
            x.copy_(typed)

    # --- after every step ---

    def check(self) -> None:
        """Compares everything with its model."""
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

    # --- rules ---

    @initialize()
    def begin(self) -> None:
        self.pools = self.open_pools()
        self.tensors, self.views = [], []
        self.families = list(FAMILIES)

    @precondition(lambda self: len(self.tensors) < MOST_TENSORS)
    @rule(
        pool=st.integers(0, 1),
        layout=layouts(),
        pages=st.integers(1, 8),
        length=st.integers(0, 9),
        zeroed=st.booleans(),
        move=st.booleans(),
        fail=failures(),
    )
    def create(
        self,
        pool: int,
        layout: Layout,
        pages: int,
        length: int,
        zeroed: bool,
        move: bool,
        fail: int | None,
    ) -> None:
        rows, dims, dtype, item_bytes = layout.rows, layout.item, layout.dtype, layout.item_bytes
        lender = self.pools[pool]
        capacity = max(length, pages * lender.page_size // item_bytes)
        make = vtensor.zeros if zeroed else vtensor.empty
        made = self.attempt(
            lender,
            lambda: make(
                *rows,
                length,
                *dims,
                grow_dim=len(rows),
                capacity=capacity,
                dtype=dtype,
                pool=lender,
                when_full="move" if move else "raise",
            ),
            fail,
        )
        if made is REFUSED:
            return
        count = torch.Size(rows).numel()
        cells = torch.zeros(count, length, item_bytes, dtype=torch.uint8, device="cpu")
        memory = Memory(count, item_bytes, lender.page_size, 0, cells)
        family = self.new_family()
        t = ModelTensor(
            made,
            lender,
            memory,
            rows,
            dims,
            dtype,
            capacity,
            family,
            frozenset({family}),
            zeroed=zeroed,
            move=move,
        )
        t.length = length
        self.settle_address(t)
        self.tensors.append(t)
        assert not bytes_of(made).any()  # I7: no old bytes, not even of its own family

    @precondition(lambda self: self.tensors)
    @rule(index=which, amount=amounts(), fail=failures())
    def extend(self, index: int, amount: Amount, fail: int | None) -> None:
        t = self.tensor(index)
        n = self.positions(t, amount)
        self.grow(t, n, lambda: t.actual.extend(n), fail)

    @precondition(lambda self: self.tensors)
    @rule(index=which, amount=amounts(), fail=failures(), strided=st.booleans())
    def append(self, index: int, amount: Amount, fail: int | None, strided: bool) -> None:
        t = self.tensor(index)
        n = self.positions(t, amount)
        data = t.new_bytes(n, self.seeded())
        x = t.typed(data)
        if strided and x.dim() > 1:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        self.grow(t, n, lambda: t.actual.append(x), fail, written=data)

    @precondition(lambda self: self.tensors)
    @rule(index=which, amount=amounts(), way=st.sampled_from(["end", "front", "truncate"]), fail=failures())
    def shrink(self, index: int, amount: Amount, way: str, fail: int | None) -> None:
        t = self.tensor(index)
        n = min(self.positions(t, amount), t.length)

        def shrink() -> vtensor.VTensor:
            return (
                t.actual.truncate(t.length - n) if way == "truncate" else t.actual.shrink(n, way == "front")
            )

        if self.attempt(t.pool, shrink, fail) is REFUSED:
            return
        t.length -= n
        t.dropped |= n > 0
        if way == "front":
            t.front += n
        if t.length == 0:
            t.front = 0  # an empty tensor has all of its capacity again

    @precondition(lambda self: self.tensors)
    @rule(index=which, part=st.integers(1, 3), amount=amounts(), fail=failures())
    def slide(self, index: int, part: int, amount: Amount, fail: int | None) -> None:
        """Moves a window: drops positions at the front and adds others at the end."""
        t = self.tensor(index)
        n = t.length * part // 4
        if n and self.attempt(t.pool, lambda: t.actual.shrink(n, front=True), None) is not REFUSED:
            t.length -= n
            t.dropped = True
            t.front += n
        self.extend(index=index, amount=amount, fail=fail)

    @precondition(lambda self: self.tensors)
    @rule(index=which, more=st.integers(0, 3), fail=failures())
    def reallocate(self, index: int, more: int, fail: int | None) -> None:
        t = self.tensor(index)
        capacity = t.length + more * t.memory.page_size // t.memory.item_bytes
        old = t.actual
        new = self.attempt(t.pool, lambda: t.actual.reallocate(capacity), fail)
        if new is REFUSED:
            return
        assert old.closed and not new.closed
        self.leave(t)
        t.actual, t.capacity = new, capacity
        self.settle_address(t)

    @precondition(lambda self: 0 < len(self.tensors) < MOST_TENSORS)
    @rule(index=which, deep=st.booleans(), fail=failures())
    def fork(self, index: int, deep: bool, fail: int | None) -> None:
        t = self.tensor(index)
        child = self.attempt(t.pool, lambda: copy.deepcopy(t.actual) if deep else t.actual.fork(), fail)
        if child is REFUSED:
            return
        memory = t.memory.copy(start=t.front)
        # From now on, neither may see what the other writes.
        before = t.families
        t.family, child_family = self.new_family(), self.new_family()
        t.families = before | {t.family}
        families = before | {child_family}
        f = replace(t, actual=child, memory=memory, family=child_family, families=families)
        f.front, f.dropped = 0, False
        self.settle_address(f)
        self.tensors.append(f)

    @precondition(lambda self: self.tensors)
    @rule(index=which, a=st.integers(0, 8), b=st.integers(0, 8), fail=failures())
    def unshare(self, index: int, a: int, b: int, fail: int | None) -> None:
        t = self.tensor(index)
        start, stop = sorted((t.length * a // 8, t.length * b // 8))
        self.attempt(t.pool, lambda: t.actual.unshare(start, stop), fail)

    @precondition(lambda self: any(t.shape_before for t in self.tensors))
    @rule(index=which, choice=st.lists(st.integers(0, 7), min_size=1, max_size=4), fail=failures())
    def reindex(self, index: int, choice: list[int], fail: int | None) -> None:
        with_rows = [t for t in self.tensors if t.shape_before]
        t = with_rows[index % len(with_rows)]
        batch = t.shape_before[0]
        chosen = [i % batch for i in choice]
        given = torch.tensor(chosen, device="cpu")
        if self.attempt(t.pool, lambda: t.actual.reindex(given), fail) is REFUSED:
            return
        inner = t.rows // batch
        rows = [i * inner + j for i in chosen for j in range(inner)]
        in_place = len(chosen) == batch and t.actual.address == t.base + t.front * t.memory.item_bytes
        if in_place:
            assert not any(v.memory is t.memory for v in self.views), "a view's pages were exchanged"
            t.memory.cells = t.memory.cells[rows]
            return
        t.memory = t.memory.copy(rows, start=t.front)
        t.front, t.dropped = 0, True
        t.shape_before = (len(chosen), *t.shape_before[1:])
        self.settle_address(t)

    @precondition(lambda self: self.tensors and len(self.views) < MOST_VIEWS)
    @rule(index=which, a=st.integers(0, 8), b=st.integers(0, 8), way=st.sampled_from(["narrow", "alias"]))
    def take_view(self, index: int, a: int, b: int, way: str) -> None:
        t = self.tensor(index)
        start, stop = sorted((t.length * a // 8, t.length * b // 8))
        if start == stop:
            return
        whole = t.actual.alias() if way == "alias" else t.actual
        view = whole.narrow(t.grow_dim, start, stop - start)
        assert type(view) is torch.Tensor
        self.views.append(ModelView(view, t.memory, t.front + start, t.front + stop, t.slots(), t, t.pool))

    @precondition(lambda self: self.views)
    @rule(index=which)
    def drop_view(self, index: int) -> None:
        del self.views[index % len(self.views)]

    @precondition(lambda self: self.tensors)
    @rule(index=which, way=st.sampled_from(["copy_", "setitem", "numpy", "out", "fill_", "zero_", "one"]))
    def write_tensor(self, index: int, way: str) -> None:
        t = self.tensor(index)
        if t.length == 0:
            return
        if not t.pool._core.kernel_copies_on_write:
            if way == "numpy":
                way = "copy_"  # no in-place operation on the tensor itself
        elif not self.may_unshare(t.pool, sum(record.shared > 1 for record in t.actual.pages())):
            return
        before = t.memory.cells
        if way in ("fill_", "one"):
            value = family_bytes(t.family, t.dtype.itemsize, self.seeded())
            scalar = value.view(t.dtype)[0].item()
            if way == "fill_":
                done = self.attempt(t.pool, lambda: t.actual.fill_(scalar), None)
                window = t.window()
            else:
                at = (*(0 for _ in t.shape_before), t.length - 1)
                done = self.attempt(t.pool, lambda: t.actual.__setitem__(at, scalar), None)
                window = t.window()[:1, -1:]
            if done is not REFUSED:
                window.copy_(value.repeat(t.memory.item_bytes // t.dtype.itemsize).expand(window.shape))
        elif way == "zero_":
            if self.attempt(t.pool, lambda: t.actual.zero_(), None) is not REFUSED:
                t.window().zero_()
        else:
            data = t.new_bytes(t.length, self.seeded())
            if self.attempt(t.pool, lambda: self.write(t.actual, data, way), None) is not REFUSED:
                t.window().copy_(data)
        assert t.memory.cells is before

    @precondition(lambda self: self.views)
    @rule(index=which, way=st.sampled_from(["copy_", "setitem", "numpy", "out"]))
    def write_view(self, index: int, way: str) -> None:
        view = self.views[index % len(self.views)]
        t = view.owner
        lives = t in self.tensors and t.memory is view.memory
        within = lives and t.front <= view.start and view.stop <= t.front + t.length
        if not view.pool._core.kernel_copies_on_write:
            # Shared pages are read-only on CUDA: a write through a view needs unshare() first.
            if not within or self.attempt(t.pool, lambda: t.actual.unshare(0, t.length), None) is REFUSED:
                return
        elif not self.may_unshare(view.pool, len(view.slots) * view.memory.rows):
            return
        n = view.stop - view.start
        data = family_bytes(t.family, view.memory.rows * n * view.memory.item_bytes, self.seeded())
        self.write(view.actual, data, way)
        view.window().copy_(data.reshape(view.memory.rows, n, -1))

    @precondition(lambda self: self.tensors)
    @rule(index=which, how=st.sampled_from(["close", "drop"]), fail=failures())
    def end(self, index: int, how: str, fail: int | None) -> None:
        """Closes a tensor, which always succeeds. Pages that a refused call leaves mapped go later."""
        t = self.tensor(index)
        self.tensors.remove(t)
        with nullcontext() if fail is None else fail_after(t.pool, fail):
            if how == "close":
                t.actual.close()
            del t.actual
        if fail is not None:
            t.pool.wait_idle(timeout=5)

    @rule(index=st.integers(0, 1))
    def trim(self, index: int) -> None:
        self.pools[index].trim()
        assert self.pools[index].stats().pages_spare == 0

    @rule(index=st.integers(0, 1), fail=failures(), fail_waking=failures())
    def sleep_and_wake(self, index: int, fail: int | None, fail_waking: int | None) -> None:
        pool = self.pools[index]
        slept = self.attempt(pool, lambda: pool.sleep(contents="host"), fail)
        if slept is not REFUSED:
            wake_again(pool, fail_waking)

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "pools"):
            self.check()
