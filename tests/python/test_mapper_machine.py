"""The random programs of vtensor.testing beside a mapper that looks ahead, caches and gives back.

What differs: pages may be ahead, cached, or held until the mapper came round, so counts are bounds until
`wait_idle()` and exact after it (I4); an injected refusal may meet either thread, and what meets the mapper
is raised by a later operation (I10); threads of their own grow and drop tensors of the same pools meanwhile.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import vtensor
from machines import case
from stream_support import busy_device
from support import check_sums, open_pool, quarter, run_together
from test_state_machine import Machine
from vtensor import testing
from vtensor.testing.machine import BUDGET_PAGES, PAGE_SIZES, REFUSED, which
from vtensor.testing.strategies import amounts, failures


class MapperMachine(Machine):
    """Look-ahead of up to 8 pages, up to 12 cached."""

    ahead, cache = 8, 12

    def open_pools(self):
        return [
            open_pool(
                self.kind, BUDGET_PAGES, page_size=size, prefetch=self.ahead * size, cache=self.cache * size
            )
            for size in PAGE_SIZES
        ]

    def rest(self, pool) -> None:
        """Lets the mapper come round. Each error that it met is raised once, and only injected errors are."""
        for _ in range(20):
            try:
                pool.wait_idle(timeout=20)
                return
            except vtensor.DriverError:
                pass
        raise AssertionError("wait_idle() raises the same error over and over")

    def facts(self, pool):
        """What no refused operation changes: lengths, addresses, what is needed."""
        stats = pool.stats()
        counts = (stats.pages_active, pool.broken, stats.tensors)
        return counts, super().facts(pool)[1]

    def attempt(self, pool, operation, fail):
        """As there; what a refused driver call ended is done again: which thread's call that was depends on
        time, and what is drawn next must not."""
        before = self.facts(pool)
        for refuse in (fail, None):
            try:
                if refuse is None:
                    return operation()
                with testing.fail_after(pool, refuse):
                    result = operation()
                self.rest(pool)
                return result
            except (vtensor.DriverError, vtensor.OutOfPages) as error:
                self.rest(pool)
                assert self.facts(pool) == before
                if isinstance(error, vtensor.OutOfPages):
                    assert "page" in str(error)
                    return REFUSED
                # The operation's own, or one that the mapper met before (I10).
        raise AssertionError("refused though no refusal was injected")

    def may_unshare(self, pool, pages):
        return super().may_unshare(pool, pages) or self.free_for_need(pool) >= pages

    def attempt_close(self, t, close, fail):
        if fail is None:
            close()
        else:
            with testing.fail_after(t.pool, fail):
                close()
            self.rest(t.pool)

    def grow(self, t, n, operation, fail, written=None):
        """As there, without a word on how many pages are free: others may be taken back."""
        before = t.length
        moves = t.move and t.front + t.length + n > t.capacity
        if n > t.room:
            self.rest(t.pool)
            self.must_exceed(operation)
            return
        result = self.attempt(t.pool, operation, fail)
        if result is REFUSED:
            if fail is None and not moves:  # I9: within the budget it must not be refused
                copies = self.may_need_copies(t, n)
                wanted = t.memory.slots(t.front, t.front + t.length + n)
                missing = len(wanted - self.mapped_slots(t)) * t.rows
                assert missing + copies > self.free_for_need(t.pool), "refused though there were pages"
            return
        assert result is t.actual
        if moves:
            self.leave(t)
            self.settle_address(t)
        t.length = before + n
        self.look_at_new(t, before, written)

    def free_for_need(self, pool) -> int:
        """Pages that neither a length nor a view needs."""
        pool.trim()
        self.rest(pool)
        stats = pool.stats()
        return stats.pages_free + stats.pages_prefetched

    @precondition(lambda self: self.tensors)
    @rule(index=which, amount=amounts(), fail=failures())
    def prepare(self, index, amount, fail):
        t = self.tensor(index)
        n = min(self.positions(t, amount), t.room)
        self.attempt(t.pool, lambda: t.actual.prepare(n), fail)

    @precondition(lambda self: self.tensors)
    @rule(index=which, amount=amounts(), fail=failures())
    def prepare_and_extend(self, index, amount, fail):
        self.prepare(index=index, amount=amount, fail=fail)
        self.extend(index=index, amount=amount, fail=None)

    @rule(index=st.integers(0, 1))
    def wait_idle(self, index):
        """I4 and I5 are exact once the mapper came to rest."""
        pool = self.pools[index]
        self.rest(pool)
        needed, held = self.needed_and_held(pool)
        stats = check_sums(pool)
        assert stats.pages_active == needed
        assert stats.pages_cached <= self.cache
        ahead_of_views = stats.pages_pinned + stats.pages_prefetched
        assert stats.pages_pinned <= held <= ahead_of_views, (stats, held)

    @rule(index=st.integers(0, 1), pages=st.integers(1, BUDGET_PAGES))
    def lower_the_budget(self, index, pages):
        pool = self.pools[index]
        needed, held = self.needed_and_held(pool)
        try:
            pool.budget = pages * pool.page_size
        except vtensor.OutOfPages:
            assert pool.budget == BUDGET_PAGES * pool.page_size
        else:
            stats = check_sums(pool)
            assert stats.pages_used <= pages
            assert stats.pages_active == needed
        pool.budget = BUDGET_PAGES * pool.page_size

    @rule(index=st.integers(0, 1), seed=st.integers(0, 3))
    def beside_others(self, index, seed):
        """Threads that grow, prepare, share and drop tensors of their own."""
        pool = self.pools[index]

        def work(number):
            with suppress(vtensor.OutOfPages, vtensor.DriverError):
                for turn in range(3):
                    t = quarter(pool, 1, rows=(1 + number % 2,), capacity=24)
                    t.fill_(number)
                    t.prepare(4 + seed)
                    view = t.fork()[:, :1] if turn == seed % 3 else t[:, :1]
                    t.extend(5).narrow(1, 1, 5).fill_(number)
                    assert t.eq(number).all() and view.eq(number).all()
                    t.shrink(seed)

        run_together(partial(work, 1), partial(work, 2))

    def check_counts(self, pool):
        stats = check_sums(pool)
        assert stats.pages_active == self.needed_and_held(pool)[0]  # I4
        assert pool.broken is None
        assert stats.tensors == sum(t.pool is pool for t in self.tensors)
        assert 0 <= stats.pages_cached <= self.cache
        testing.check_invariants(pool)  # I3, I5, I6

    @rule(index=st.integers(0, 1))
    def trim(self, index):
        pool = self.pools[index]
        pool.trim()
        assert pool.stats().pages_cached == 0

    def come_to_rest(self, pool):
        pool.trim()
        self.rest(pool)


class CudaMapperMachine(MapperMachine):
    kind = "simcuda"


class BusyDeviceMachine(CudaMapperMachine):
    """Unmap and set-access wait for the device, which is busy."""

    def open_pools(self):
        pools = super().open_pools()
        self.busy = busy_device()
        self.busy.__enter__()
        return pools

    def teardown(self):
        try:
            super().teardown()
        finally:
            if hasattr(self, "busy"):
                self.busy.__exit__(None, None, None)


class AskedMachine(MapperMachine):
    """The mapper works only for what is prepared; freed tensors are cached all the same."""

    ahead = 0


TestLookingAhead = case(MapperMachine, 40, seconds=300)
TestAsked = case(AskedMachine, 20, seconds=300)
TestSimulatedCuda = case(CudaMapperMachine, 20, seconds=300)
TestBusyDevice = case(BusyDeviceMachine, 10, seconds=300)
