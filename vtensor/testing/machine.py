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
from dataclasses import replace

import torch

import vtensor
from vtensor.testing._checks import wake_again
from vtensor.testing._world import BUDGET_PAGES, PAGE_SIZES, REFUSED, UNKNOWN_TO_NUMPY, World
from vtensor.testing.model import FAMILIES, Memory, ModelTensor, ModelView, bytes_of, family_bytes

# Imported before hypothesis, because its error says what to do if hypothesis is missing.
from vtensor.testing.strategies import Amount, Layout, amounts, failures, layouts  # isort: split

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

__all__ = ["BUDGET_PAGES", "PAGE_SIZES", "REFUSED", "TensorMachine", "which"]

MOST_TENSORS = 6
MOST_VIEWS = 6

which = st.integers(0, 11)
"""A strategy for the index of a tensor or a view, for ``TensorMachine.tensor``."""


class TensorMachine(World, RuleBasedStateMachine):
    """Random programs over the tensors, forks and views of two pools.

    Its state is in ``pools``, ``tensors`` (each with ``actual`` and ``expected()``) and ``views``. A rule of
    your own gets a tensor by ``self.tensor(index)``. Override ``open_pools()`` to test other pools.
    """

    @initialize()
    def begin(self) -> None:
        self.pools = self.open_pools()
        self.tensors: list[ModelTensor] = []
        self.views: list[ModelView] = []
        self.seed = 0
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
        cells = torch.zeros(count, length, item_bytes, dtype=torch.uint8)
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
    @rule(index=which, amount=amounts(), front=st.booleans(), fail=failures())
    def shrink(self, index: int, amount: Amount, front: bool, fail: int | None) -> None:
        t = self.tensor(index)
        n = min(self.positions(t, amount), t.length)
        if self.attempt(t.pool, lambda: t.actual.shrink(n, front=front), fail) is REFUSED:
            return
        t.length -= n
        if front:
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
            t.front += n
        self.extend(index=index, amount=amount, fail=fail)

    @precondition(lambda self: self.tensors)
    @rule(index=which, part=st.integers(0, 4), fail=failures())
    def truncate(self, index: int, part: int, fail: int | None) -> None:
        t = self.tensor(index)
        length = t.length * part // 4
        if self.attempt(t.pool, lambda: t.actual.truncate(length), fail) is REFUSED:
            return
        t.length = length
        if t.length == 0:
            t.front = 0

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
        f = replace(t, actual=child, memory=memory, family=child_family, families=families, front=0)
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
        if self.attempt(t.pool, lambda: t.actual.reindex(torch.tensor(chosen)), fail) is REFUSED:
            return
        inner = t.rows // batch
        rows = [i * inner + j for i in chosen for j in range(inner)]
        in_place = len(chosen) == batch and t.actual.address == t.base + t.front * t.memory.item_bytes
        if in_place:
            assert not any(v.memory is t.memory for v in self.views), "a view's pages were exchanged"
            t.memory.cells = t.memory.cells[rows]
            return
        t.memory = t.memory.copy(rows, start=t.front)
        t.front = 0
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
        elif not self.may_unshare(t.pool, self.shared_pages(t)):
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
            if self.attempt(t.pool, lambda: self.write(t.actual, data, t, way), None) is not REFUSED:
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
        data = data.reshape(view.memory.rows, n, -1)
        shape = view.actual.shape
        typed = data.reshape(-1).view(t.dtype).reshape(shape)
        if way == "numpy" and t.dtype not in UNKNOWN_TO_NUMPY:
            view.actual.numpy()[...] = typed.numpy()
        elif way == "setitem":
            view.actual[...] = typed
        else:
            view.actual.copy_(typed)
        view.window().copy_(data)

    @precondition(lambda self: self.tensors)
    @rule(index=which, how=st.sampled_from(["close", "drop"]), fail=failures())
    def end(self, index: int, how: str, fail: int | None) -> None:
        t = self.tensor(index)
        self.tensors.remove(t)

        def close() -> None:
            if how == "close":
                t.actual.close()
            del t.actual

        self.attempt_close(t, close, fail)

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
