"""The part of a pool that stays after close()."""

from __future__ import annotations

from vtensor import _core


class ClosedPool:
    """Reports from the core's pool, which lives until the last view over its pages is gone. Reports the last
    counts after that.
    """

    kernel_copies_on_write = True

    def __init__(self, core: _core.PagePool) -> None:
        self._pool = _core.WeakPool(core)
        self.leave_mapper = self._pool.leave_mapper
        self._calls, self._events = core.driver_calls(), core.events()
        self.page_size, self.budget_pages, self.device = core.page_size, core.budget_pages, core.device
        self.broken, self.sharing = core.broken, core.sharing

    def counts(self) -> _core.PoolCounts:
        pool = self._pool.get()
        return _core.PoolCounts(self.budget_pages) if pool is None else pool.counts()

    def events(self) -> _core.PoolEvents:
        pool = self._pool.get()
        return self._events if pool is None else pool.events()

    def driver_calls(self) -> dict[str, dict[str, int]]:
        pool = self._pool.get()
        if pool is not None:
            self._calls = pool.driver_calls()
        return self._calls

    def trim(self) -> int:
        pool = self._pool.get()
        return 0 if pool is None or self.broken is not None else pool.trim()

    def wait_idle(self, seconds: float) -> None:
        pool = self._pool.get()
        if pool is not None:
            pool.wait_idle(seconds)

    def check_invariants(self) -> None:
        pool = self._pool.get()
        if pool is not None:
            pool.check_invariants()
