"""Limits of the system, each reached in a process of its own: addresses, mappings, descriptors, memory."""

from __future__ import annotations

import pytest

from support import run_snippet


def test_max_map_count():
    """Scattered pages until the kernel has no mapping left: an error, and all can still be closed."""
    result = run_snippet(
        """
limit = int(open("/proc/sys/vm/max_map_count").read())
if limit > 200_000:
    print("SKIP"); raise SystemExit
def maps():
    return sum(1 for _ in open("/proc/self/maps"))
start = maps()
pool = vtensor.Pool("cpu", page_size=4096, budget=(limit * 2) * 4096, prefetch=0)
made = []
def grow():
    t = quarter(pool, 0, capacity=2000)
    made.append(t)
    for i in range(250):
        t.extend(8).shrink(4, front=True)
        made.append(t.fork().shrink(4).extend(4))
refused = None
for i in range(2000):
    try:
        grow()
    except vtensor.VTensorError as error:
        refused = error
        break
assert refused is not None, maps()
text = str(refused)
assert "max_map_count" in text and "sysctl" in text, text
assert isinstance(refused, vtensor.DriverError), type(refused)
assert maps() > limit // 2, (maps(), limit)
testing.check_invariants(pool)
last = made[-1]
length = last.length
for i in range(3):
    try:
        last.extend(1)
    except vtensor.DriverError:
        assert last.length == length
    last.truncate(length)
at_limit = maps()
# Give back every other one first: holes inside merged mappings need splits of their own.
for t in made[::2] + made[1::2]:
    t.close()
made.clear(); last = None; t = None
gc.collect()
stats = pool.stats()
assert pool.broken is None and stats.pages_used == 0 and stats.pages_mapped == 0, stats
pool.close()
assert maps() <= start + 50 + 4, (start, at_limit, maps())  # the host drivers keep 4 as ballast
again = vtensor.Pool("cpu", page_size=4096, budget=1 << 20, prefetch=0)
t = filled(again, 9); assert t.eq(1).all(); t.close(); again.close()
""",
        timeout=90,
    ).check()
    if result.out.startswith("SKIP"):
        pytest.skip("vm.max_map_count is raised on this machine")


def test_private_memory_refused():
    """`ulimit -d` is named, and not the limit on mappings: what is shared is mapped private and writable."""
    run_snippet(
        """
        import resource
        pool = vtensor.Pool("cpu", page_size=65536, budget=1 << 28, prefetch=0)
        t = filled(pool, 2048, capacity=2048)  # 32 MiB
        # Once a mapping has passed the limit, malloc gets nothing more from the kernel either.
        *blocks, top = [bytes(1000) for _ in range(1000)]
        del blocks
        for line in open("/proc/self/status"):
            if line.startswith("VmData:"):
                now = int(line.split()[1]) * 1024
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (now + (8 << 20), hard))
        for _ in range(2):
            try:
                t.fork()
            except vtensor.DriverError as error:
                assert error.call == "mmap" and error.name == "ENOMEM", (error.call, error.name)
                assert "RLIMIT_DATA" in str(error) and "ulimit -d" in str(error), error
                assert "max_map_count" not in str(error), error
            else:
                raise AssertionError("32 MiB were mapped private")
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        f = t.fork()
        assert torch.equal(f, t)
        f.close(); t.close(); pool.close()
        """
    ).check()


def test_addresses_cost_nothing():
    """At most a byte for each reserved page until something is mapped, and then only what lies near."""
    run_snippet(
        """
        page = 65536
        pool = vtensor.Pool("cpu", page_size=page, budget=64 * page)
        small = vtensor.Arena(page, pool=pool)
        small.map([(0, page)])
        small.tensor.fill_(7)  # has torch load what it needs for that
        small.close()
        before = resident()
        arena = vtensor.Arena(1 << 40, pool=pool)
        assert resident() - before < (1 << 40) // page
        ends = [(at, at + page) for at in (0, 1 << 39, (1 << 40) - page)]
        arena.map(ends)
        arena.prepare([(1 << 38, (1 << 38) + page)])
        pool.wait_idle()
        for begin, end in ends:
            arena.tensor[begin:end].fill_(7)
        assert arena.holds(ends) == [True] * 3 and arena.holds([(page, 2 * page)]) == [False]
        assert [record.index for record in arena.pages()] == [0, 1 << 22, 1 << 23, (1 << 24) - 1]
        assert resident() - before < (1 << 40) // page
        arena.unmap(ends)
        assert arena.stats().pages_cached == 3 and arena.trim() == 4 * page
        testing.check_invariants(pool)
        arena.close(); pool.close()
        """
    ).check()
