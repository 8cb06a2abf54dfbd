"""I8, I9: where a limit of the process is reached, each operation works or raises an error of vtensor, and
changes nothing then; once there is room again, all of them work."""

from __future__ import annotations

import pytest

from support import run_snippet

SCENE = """
import mmap, os, resource
from vtensor.testing.kv_model import check_contents, write

def addresses():
    return int(open("/proc/self/statm").read().split()[0]) * 4096

class limited:
    def __init__(self, kind, value):
        self.kind, self.value = kind, value
    def __enter__(self):
        self.before = resource.getrlimit(self.kind)
        resource.setrlimit(self.kind, (self.value(), self.before[1]))
    def __exit__(self, *exc):
        resource.setrlimit(self.kind, self.before)

class mappings_used_up:
    def __enter__(self):
        self.taken = []
        try:
            while True:
                self.taken.append(mmap.mmap(-1, 4096))
        except OSError:
            pass
    def __exit__(self, *exc):
        self.taken.clear()

def no_threads():
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 65534)  # root may have any number
    return limited(resource.RLIMIT_NPROC, lambda: 0)

def no_addresses():
    return limited(resource.RLIMIT_AS, lambda: addresses() + (2 << 20))

def no_descriptors():
    return limited(resource.RLIMIT_NOFILE, lambda: 3)

pool = vtensor.Pool(page_size=4096, budget=64 << 20)
t = vtensor.zeros(0, 256, grow_dim=0, capacity=4096, pool=pool)
t.append(torch.ones(100, 256))
cache = vtensor.KVCache(2, 2, 32, 6, 1024, dtype=torch.float32, pool=pool)
slot = cache.alloc(list(range(1000)))
assert cache.step([1000, 0, 0, 0, 0, 0])
write(cache, slot, 0, range(1000))
away = cache.alloc()
assert cache.step([1000, 500, 0, 0, 0, 0])
write(cache, away, 0, range(500))
cache.swap_out(away)
cache.wait(away)
more = torch.ones(50, 256)
refused, texts = [], []

def attempt(what, call):
    try:
        return call()
    except vtensor.VTensorError as error:
        text = str(error)
        assert text.startswith("[") and ": " in text, text
        refused.append(what)
        texts.append(text)
        return error

def work():
    made = []
    pools = [attempt("pool", lambda: vtensor.Pool(page_size=4096, budget=1 << 20))]
    made += [attempt("empty", lambda: vtensor.empty(64, 256, grow_dim=0, capacity=9000, pool=pool))]
    made += [attempt("fork", lambda: t.fork())]
    before = t.length
    if attempt("prepare", lambda: t.prepare(64)) is not None and refused[-1:] == ["prepare"]:
        assert t.length == before
    if isinstance(attempt("append", lambda: t.append(more)), vtensor.VTensorError):
        assert t.length == before
    assert t[:100].eq(1).all()
    made += [attempt("cache", lambda: vtensor.KVCache(1, 1, 32, 2, 64, dtype=torch.float32, pool=pool))]
    attempt("publish", lambda: cache.publish(slot, list(range(1000))))
    forks = attempt("cache.fork", lambda: cache.fork(slot))
    attempt("swap_out", lambda: cache.swap_out(slot))
    if cache.stats().slots_swapped == 2:
        attempt("swap_in", lambda: cache.swap_in(slot))
    attempt("swap_in of another", lambda: cache.swap_in(away))
    if not isinstance(forks, vtensor.VTensorError):
        cache.free(forks[0])
    for one in made + pools:
        if not isinstance(one, vtensor.VTensorError):
            one.close()

def all_is_well():
    for one, n in ((slot, 1000), (away, 500)):
        if cache.lengths[one] == 0:
            assert cache.swap_in(one)
        cache.wait(one)
        check_contents(cache, one, range(n))
    for once in (pool.wait_idle, lambda: t.extend(0)):  # raises what the mapper met meanwhile (I10)
        attempt("the mapper", once)
    count = len(refused)
    cache.swap_out(away)
    work()
    assert len(refused) == count, refused
    cache.close()
    t.close()
    pool.close()
    assert pool.stats().pages_used == 0 and pool.stats().nbytes_reserved == 0
"""


LIMITS = {
    "no_threads": "ulimit -u",
    "no_addresses": "ulimit -v",
    "mappings_used_up": "vm.max_map_count",
    "no_descriptors": "ulimit -n",
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_is_reached(limit):
    """And named."""
    code = f"""
descriptors = open_files()
with {limit}():
    work()
assert any({LIMITS[limit]!r} in text for text in texts), texts
assert open_files() == descriptors
all_is_well()
"""
    run_snippet(SCENE + code, timeout=60).check()
