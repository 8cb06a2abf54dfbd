"""Random programs against the model, on the host and on the simulated libcuda.

After every step: addresses (I1), contents of tensors and views bit for bit (I2, I3, I6), the counts of
mapped, needed and held pages (I4), budget and reference counts (I5), whose bytes new positions show (I7).
A step that fails, by an injected refusal of a driver call or for want of pages, changes nothing (I8, I9).
At the end all is closed and nothing is left (I14).
"""

from __future__ import annotations

import copy
import gc
import sys

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import vtensor
from model import FAMILIES, Memory, ModelTensor, ModelView, family_bytes, held_slots, only_of
from support import bytes_of, open_pool, simcuda_library
from vtensor import testing

# (dtype, dims of a position): 512, 154, 1, 1032, 1000, 8200 and 2,000 bytes; pages are 4 and 16 KiB.
ITEMS = [
    (torch.float32, (8, 16)),
    (torch.float16, (7, 11)),
    (torch.uint8, ()),
    (torch.complex64, (129,)),
    (torch.float8_e4m3fn, (1000,)),
    (torch.int64, (1025,)),
    (torch.bfloat16, (10, 100)),
]
ROWS = [(), (1,), (3,), (2, 2)]
BUDGET_PAGES = 32
MOST_TENSORS = 6
MOST_VIEWS = 6
REFUSED = object()

which = st.integers(0, 11)
# None, or how many driver calls pass before one is refused.
failure = st.one_of(st.none(), st.none(), st.integers(0, 7))
# How far: nothing, a position, to the end of a page, a position more, some pages; all the room, and more.
AMOUNTS = ["none", "one", "few", "fill", "over", "pages", "pages", "rest", "beyond"]
amounts = st.tuples(st.sampled_from(AMOUNTS), st.integers(1, 4))


def numpy_takes(dtype: torch.dtype) -> bool:
    return dtype not in (torch.bfloat16, torch.float8_e4m3fn)


class Machine(RuleBasedStateMachine):
    kind = "host"

    @initialize()
    def begin(self):
        self.pools = [
            open_pool(self.kind, BUDGET_PAGES, page_size=4096),
            open_pool(self.kind, BUDGET_PAGES, page_size=16384),
        ]
        self.tensors: list[ModelTensor] = []
        self.views: list[ModelView] = []
        self.seed = 0
        self.families = list(FAMILIES)

    # --- helpers ---

    def seeded(self) -> int:
        self.seed += 1
        return self.seed

    def tensor(self, index: int) -> ModelTensor:
        return self.tensors[index % len(self.tensors)]

    def new_family(self) -> int:
        family = self.families.pop(0)
        self.families.append(family)
        return family

    def positions(self, t: ModelTensor, amount: tuple[str, int]) -> int:
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

    def facts(self, pool):
        stats = pool.stats()
        counts = (
            stats.pages_used,
            stats.pages_free,
            stats.pages_mapped,
            stats.pages_needed,
            stats.pages_held,
            stats.pages_quarantined,
            stats.nbytes_reserved,
            stats.tensors,
        )
        return counts, [
            (t.serial, t.actual.length, t.actual.capacity, t.actual.address, t.actual.shape, t.actual.closed)
            for t in self.tensors
        ]

    def attempt(self, pool, operation, fail):
        """Runs it; where a driver call is refused or pages are short, asserts that nothing changed (I8)."""
        before, parted = self.facts(pool), pool.stats().pages_parted
        try:
            if fail is None:
                return operation()
            with testing.fail_after(pool, fail):
                result = operation()
            pool.wait_idle(timeout=5)  # what could not be given back then, is now (I4)
            return result
        except vtensor.DriverError as error:
            assert fail is not None, error
        except vtensor.OutOfPages as error:
            assert "page" in str(error)
        after = self.facts(pool)
        if pool.stats().pages_parted != parted:
            # What had parted was folded first: a page that nobody saw any more may be free by that.
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
        """Takes over what new positions show, after a check of whose bytes they are (I7)."""
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
            if view.memory is t.memory and not t.zeroed and written is None:  # what a view still sees, stays
                a, b = max(view.start, begin), min(view.stop, end)
                if a < b:
                    assert torch.equal(data[:, a - begin : b - begin], t.memory.cells[:, a:b])
        t.memory.cells[:, begin:end] = data

    def leave(self, t: ModelTensor) -> None:
        """The tensor has left its memory; the views stay on it."""
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

    # --- rules ---

    @precondition(lambda self: len(self.tensors) < MOST_TENSORS)
    @rule(
        pool=st.integers(0, 1),
        item=st.sampled_from(ITEMS),
        rows=st.sampled_from(ROWS),
        pages=st.integers(1, 8),
        length=st.integers(0, 9),
        zeroed=st.booleans(),
        move=st.booleans(),
        fail=failure,
    )
    def create(self, pool, item, rows, pages, length, zeroed, move, fail):
        pool = self.pools[pool]
        dtype, dims = item
        item_bytes = dtype.itemsize * torch.Size(dims).numel()
        capacity = max(length, pages * pool.page_size // item_bytes)
        make = vtensor.zeros if zeroed else vtensor.empty
        made = self.attempt(
            pool,
            lambda: make(
                *rows,
                length,
                *dims,
                grow_dim=len(rows),
                capacity=capacity,
                dtype=dtype,
                pool=pool,
                when_full="move" if move else "raise",
            ),
            fail,
        )
        if made is REFUSED:
            return
        count = torch.Size(rows).numel()
        cells = torch.zeros(count, length, item_bytes, dtype=torch.uint8)
        memory = Memory(count, item_bytes, pool.page_size, 0, cells)
        family = self.new_family()
        t = ModelTensor(
            made,
            pool,
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
        assert not bytes_of(made).any()  # I7: no older bytes, not even of its family

    def grow(self, t: ModelTensor, n: int, operation, fail, written: torch.Tensor | None = None) -> None:
        """Grows by n, which `written` are, or nobody wrote yet."""
        copies = self.may_need_copies(t, n)
        before = t.length
        wanted = t.memory.slots(t.front, t.front + t.length + n)
        moves = t.move and t.front + t.length + n > t.capacity
        missing = 0 if moves else len(wanted - self.mapped_slots(t)) * t.rows
        stats = t.pool.stats()
        free = stats.pages_free
        if n > t.room:
            facts = self.facts(t.pool)
            with pytest.raises(vtensor.CapacityExceeded):
                operation()
            assert self.facts(t.pool) == facts
            return
        result = self.attempt(t.pool, operation, fail)
        if result is REFUSED:
            if fail is None and not moves:
                assert missing + copies > free, "refused though there were pages"
            return
        assert result is t.actual
        # Folding a parted page may free what both sides had shared.
        assert missing <= free + stats.pages_parted, "granted though there were no pages"
        if moves:
            self.leave(t)
            self.settle_address(t)
        t.length = before + n
        self.look_at_new(t, before, written)

    def may_need_copies(self, t: ModelTensor, n: int) -> int:
        """Pages that new positions share with what is mapped: at most these are copied."""
        if n == 0:
            return 0
        new = t.memory.slots(t.front + t.length, t.front + t.length + n)
        return len(new & self.mapped_slots(t)) * t.rows

    @precondition(lambda self: self.tensors)
    @rule(index=which, amount=amounts, fail=failure)
    def extend(self, index, amount, fail):
        t = self.tensor(index)
        n = self.positions(t, amount)
        self.grow(t, n, lambda: t.actual.extend(n), fail)

    @precondition(lambda self: self.tensors)
    @rule(index=which, amount=amounts, fail=failure, strided=st.booleans())
    def append(self, index, amount, fail, strided):
        t = self.tensor(index)
        n = self.positions(t, amount)
        data = t.new_bytes(n, self.seeded())
        x = t.typed(data)
        if strided and x.dim() > 1:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        self.grow(t, n, lambda: t.actual.append(x), fail, written=data)

    @precondition(lambda self: self.tensors)
    @rule(index=which, amount=amounts, front=st.booleans(), fail=failure)
    def shrink(self, index, amount, front, fail):
        t = self.tensor(index)
        n = min(self.positions(t, amount), t.length)
        if self.attempt(t.pool, lambda: t.actual.shrink(n, front=front), fail) is REFUSED:
            return
        t.length -= n
        if front:
            t.front += n
        if t.length == 0:
            t.front = 0  # nothing lives, so all of the capacity is there again

    @precondition(lambda self: self.tensors)
    @rule(index=which, part=st.integers(1, 3), amount=amounts, fail=failure)
    def slide(self, index, part, amount, fail):
        """A window that moves on: positions go at the front, and others come at the end."""
        t = self.tensor(index)
        n = t.length * part // 4
        if n and self.attempt(t.pool, lambda: t.actual.shrink(n, front=True), None) is not REFUSED:
            t.length -= n
            t.front += n
        self.extend(index=index, amount=amount, fail=fail)

    @precondition(lambda self: self.tensors)
    @rule(index=which, part=st.integers(0, 4), fail=failure)
    def truncate(self, index, part, fail):
        t = self.tensor(index)
        length = t.length * part // 4
        if self.attempt(t.pool, lambda: t.actual.truncate(length), fail) is REFUSED:
            return
        t.length = length
        if t.length == 0:
            t.front = 0

    @precondition(lambda self: self.tensors)
    @rule(index=which, more=st.integers(0, 3), fail=failure)
    def reallocate(self, index, more, fail):
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
    @rule(index=which, deep=st.booleans(), fail=failure)
    def fork(self, index, deep, fail):
        t = self.tensor(index)
        child = self.attempt(t.pool, lambda: copy.deepcopy(t.actual) if deep else t.actual.fork(), fail)
        if child is REFUSED:
            return
        memory = t.memory.copy(start=t.front)
        # What either writes from now on is not the other's to see.
        before = t.families
        t.family, child_family = self.new_family(), self.new_family()
        t.families = before | {t.family}
        f = ModelTensor(
            child,
            t.pool,
            memory,
            t.shape_before,
            t.item,
            t.dtype,
            t.capacity,
            child_family,
            before | {child_family},
            length=t.length,
            zeroed=t.zeroed,
            move=t.move,
        )
        self.settle_address(f)
        self.tensors.append(f)

    @precondition(lambda self: self.tensors)
    @rule(index=which, a=st.integers(0, 8), b=st.integers(0, 8), fail=failure)
    def own(self, index, a, b, fail):
        t = self.tensor(index)
        start, stop = sorted((t.length * a // 8, t.length * b // 8))
        self.attempt(t.pool, lambda: t.actual.own(start, stop), fail)

    @precondition(lambda self: any(t.shape_before for t in self.tensors))
    @rule(index=which, choice=st.lists(st.integers(0, 7), min_size=1, max_size=4), fail=failure)
    def reindex(self, index, choice, fail):
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
    @rule(index=which, a=st.integers(0, 8), b=st.integers(0, 8), way=st.sampled_from(["narrow", "snapshot"]))
    def take_view(self, index, a, b, way):
        t = self.tensor(index)
        start, stop = sorted((t.length * a // 8, t.length * b // 8))
        if start == stop:
            return
        whole = t.actual.snapshot() if way == "snapshot" else t.actual
        view = whole.narrow(t.grow_dim, start, stop - start)
        assert type(view) is torch.Tensor
        self.views.append(ModelView(view, t.memory, t.front + start, t.front + stop, t.slots(), t, t.pool))

    @precondition(lambda self: self.views)
    @rule(index=which)
    def drop_view(self, index):
        del self.views[index % len(self.views)]

    def shared_pages(self, t: ModelTensor) -> int:
        return sum(record.shared > 1 for record in t.actual.pages())

    def write(self, x, data, t: ModelTensor, way: str) -> None:
        """Writes the bytes `data` [rows, n, item] into x by one of torch's ways."""
        typed = t.typed(data)
        if way == "numpy" and numpy_takes(t.dtype):
            x.numpy()[...] = typed.numpy()
        elif way == "setitem":
            x[...] = typed
        elif way == "out" and t.dtype is not torch.float8_e4m3fn:
            torch.index_select(typed, t.grow_dim, torch.arange(typed.shape[t.grow_dim]), out=x)
        else:
            x.copy_(typed)

    @precondition(lambda self: self.tensors)
    @rule(index=which, way=st.sampled_from(["copy_", "setitem", "numpy", "out", "fill_", "zero_", "one"]))
    def write_tensor(self, index, way):
        t = self.tensor(index)
        if t.length == 0:
            return
        if self.kind == "simcuda":
            if way == "numpy":
                way = "copy_"  # no in-place operation on the tensor itself
        elif t.pool.stats().pages_free < self.shared_pages(t):
            return  # the kernel parts pages without asking; what then is, test_sharing.py says
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
    def write_view(self, index, way):
        view = self.views[index % len(self.views)]
        t = view.owner
        lives = t in self.tensors and t.memory is view.memory
        within = lives and t.front <= view.start and view.stop <= t.front + t.length
        if self.kind == "simcuda":
            # Shared pages are read-only there: a caller who writes through views calls own() before.
            if not within or self.attempt(t.pool, lambda: t.actual.own(0, t.length), None) is REFUSED:
                return
        elif view.pool.stats().pages_free < len(view.slots) * view.memory.rows:
            return
        n = view.stop - view.start
        data = family_bytes(t.family, view.memory.rows * n * view.memory.item_bytes, self.seeded())
        data = data.reshape(view.memory.rows, n, -1)
        shape = view.actual.shape
        typed = data.reshape(-1).view(t.dtype).reshape(shape)
        if way == "numpy" and numpy_takes(t.dtype):
            view.actual.numpy()[...] = typed.numpy()
        elif way == "setitem":
            view.actual[...] = typed
        else:
            view.actual.copy_(typed)
        view.window().copy_(data)

    @precondition(lambda self: self.tensors)
    @rule(index=which, how=st.sampled_from(["close", "drop"]), fail=failure)
    def end(self, index, how, fail):
        t = self.tensor(index)
        self.tensors.remove(t)

        def close():
            if how == "close":
                t.actual.close()
            t.actual = None

        assert self.attempt_close(t, close, fail)

    def attempt_close(self, t, close, fail) -> bool:
        """Closing always succeeds; what a refused call leaves behind goes later."""
        if fail is None:
            close()
        else:
            with testing.fail_after(t.pool, fail):
                close()
            t.pool.wait_idle(timeout=5)
        return True

    @rule(index=st.integers(0, 1))
    def trim(self, index):
        self.pools[index].trim()
        assert self.pools[index].stats().pages_cached == 0

    # --- after every step ---

    @invariant()
    def everything_holds(self):
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

    def needed_and_held(self, pool) -> tuple[int, int]:
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
            held += held_slots(memory, slots, self.views)
        return needed, held

    def check_counts(self, pool):
        stats = pool.stats()
        needed, held = self.needed_and_held(pool)
        assert stats.pages_needed == needed  # I4
        assert stats.pages_held == held, (stats.pages_held, held)
        assert (stats.pages_ahead, stats.pages_parked, stats.pages_quarantined) == (0, 0, 0)
        assert stats.pages_mapped == needed + held
        assert stats.nbytes_mapped == stats.pages_mapped * pool.page_size
        assert stats.pages_used - stats.pages_parted <= stats.pages_mapped
        assert stats.pages_used + stats.pages_free == BUDGET_PAGES  # I5
        assert stats.tensors == sum(t.pool is pool for t in self.tensors)
        testing.check_invariants(pool)  # I5

    def come_to_rest(self, pool):
        """Before the end is looked at. Here everything is given back at once."""

    def teardown(self):
        if not hasattr(self, "pools") or sys.exc_info()[0] is not None:
            return  # a failed step keeps what its frames name
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


class CudaMachine(Machine):
    kind = "simcuda"


TestHost = Machine.TestCase
TestHost.pytestmark = [pytest.mark.seconds(300)]
TestSimulatedCuda = pytest.mark.skipif(
    simcuda_library() is None, reason="libsimcuda.so is not built (set VTENSOR_SIMCUDA to its path)"
)(CudaMachine.TestCase)
TestSimulatedCuda.pytestmark.append(pytest.mark.seconds(300))
