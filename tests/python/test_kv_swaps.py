"""KVCache.swap_out, swap_in and wait: data, sharing, memory, and what is refused."""

from __future__ import annotations

import pytest

import vtensor
from kv_support import MAX_BATCH, RANGES, SHAPES, UNIT, filled, grown, lacks_host_memory, make_cache
from support import calls, calls_since, run_snippet
from vtensor.testing.kv_model import check_contents


def test_a_step_waits_for_pages_that_are_being_swapped_out(pool_factory, kind):
    with make_cache(pool_factory(kind, 4 * RANGES)) as cache:
        slot = cache.alloc()
        grown(cache, slot, 4 * UNIT)
        other = cache.alloc()
        cache.swap_out(slot)
        assert cache.step([4 * UNIT if at == other else 0 for at in range(MAX_BATCH)])


@pytest.mark.exact
def test_pages_are_present_before_they_are_copied_to(pool_factory):
    """Page tables are filled in large steps: a fault for each page takes twice the copy's time."""
    with make_cache(pool_factory("host", 400)) as cache:
        slot = filled(cache, 40)
        cache.swap_out(slot)
        cache.wait(slot)
        before = calls(cache.pool)
        assert cache.swap_in(slot)
        cache.wait(slot)
        assert calls_since(cache.pool, before)["madvise"] > 0
        check_contents(cache, slot, range(40))


@pytest.mark.parametrize("layers_first", [True, False])
def test_what_a_layer_reads_is_there_once_it_was_waited_for(pool_factory, kind, layers_first):
    with make_cache(pool_factory(kind, 400), "windows") as cache:
        slot = filled(cache, 70)
        cache.swap_out(slot)
        assert cache.swap_in(slot)  # behind the copies out, which may not have ended
        for layer in range(len(cache)) if layers_first else reversed(range(len(cache))):
            cache.wait(slot, layer)
        check_contents(cache, slot, range(70), SHAPES["windows"]["windows"])


@pytest.mark.parametrize(("bands", "layer"), [(None, None), (None, 0), ([0], 0)])
def test_what_reads_a_slot_waits_on_the_device_for_its_copies(sim, stream_pool, bands, layer):
    """I2: a wait returns at once, and the current stream's kernels start behind the copies."""
    with make_cache(stream_pool(pages=200), bands=1 if bands is None else 2) as cache:
        slot = filled(cache, 40)
        cache.swap_out(slot, bands=bands)
        cache.wait(slot)
        sim.hold()  # the copying stream as well
        assert cache.swap_in(slot, bands=bands)
        sim.release(0)
        assert sim.pending(0) == 0
        cache.wait(slot, layer)
        sim.kernel(0, cache[0][0][slot, :40])
        assert sim.pending(0) > 0  # waits
        sim.release()
        check_contents(cache, slot, range(40))


@pytest.mark.exact
@pytest.mark.parametrize(("bands", "nth"), [(None, 2), ([0, 1], 3)])
def test_a_swap_without_host_memory_changes_nothing(pool_factory, kind, monkeypatch, bands, nth):
    options = {} if bands is None else {"bands": bands}
    with make_cache(pool_factory(kind, 400), num_layers=4, bands=4) as cache:
        group = [filled(cache, 20), filled(cache, 20)]
        lacks_host_memory(monkeypatch, nth)
        with pytest.raises(vtensor.OutOfPages, match="host memory.*compute it again"):
            cache.swap_out(group, **options)
        monkeypatch.undo()
        assert [cache.bands_away(slot) for slot in group] == [[], []]
        assert cache.stats().slots_swapped == 0 and cache.lengths[:2] == [20, 20]
        for slot in group:
            check_contents(cache, slot, range(20))
        cache.swap_out(group, **options)


PREAMBLE = """
import random, resource, signal
from vtensor.testing.kv_model import check_contents, write
pool = vtensor.Pool(page_size=4096, budget=64 << 20, prefetch=0)
cache = vtensor.KVCache(2, 2, 32, 4, 1024, dtype=torch.float32, pool=pool)
slot = cache.alloc()
assert cache.step([1000, 0, 0, 0])
write(cache, slot, 0, range(1000))
"""


def test_no_thread_for_the_copies():
    """Nothing is changed, the error says what is missing, and it works once there is room."""
    run_snippet(
        PREAMBLE
        + """
def addresses():
    return int(open("/proc/self/statm").read().split()[0]) * 4096
torch.empty(4 << 20, dtype=torch.uint8)
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (addresses() + (6 << 20), hard))
try:
    cache.swap_out(slot)
except vtensor.DriverError as error:
    assert error.call == "pthread_create" and "thread" in str(error), error
else:
    sys.exit("it was not refused")
finally:
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
assert cache.lengths[slot] == 1000
check_contents(cache, slot, range(1000))
cache.swap_out(slot)
assert cache.swap_in(slot)
cache.wait(slot)
check_contents(cache, slot, range(1000))
cache.close()
pool.close()
"""
    ).check()


@pytest.mark.exact
def test_signals_while_requests_come_and_go():
    """I17, I2: a handler that raises at any moment of swapping leaves the request here or away, whole."""
    run_snippet(
        PREAMBLE
        + """
class Late(Exception):
    pass
def late(number, frame):
    raise Late
signal.signal(signal.SIGALRM, late)
random.seed(5)
interrupted = 0
for _ in range(60):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 2e-3))
        cache.swap_out(slot)
        cache.swap_in(slot)
        cache.wait(slot)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Late:
        interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if cache.stats().slots_swapped:
        assert cache.swap_in(slot)
    cache.wait(slot)
    check_contents(cache, slot, range(1000))
assert interrupted > 2, interrupted
cache.close()
pool.close()
"""
    ).check()


def test_a_write_in_place_to_a_shared_page_goes_out_with_its_slot(pool_factory):
    """I2: the kernel has copied the page then, and slots that are saved together share it no longer."""
    with make_cache(pool_factory("host", 400)) as cache:
        slot = filled(cache, 3 * UNIT)
        (fork,) = cache.fork(slot)
        cache[1][0][fork, 2 * UNIT - 1] = 9
        cache.swap_out([slot, fork])
        assert cache.swap_in([slot, fork])
        for one in (slot, fork):
            cache.wait(one)
        assert cache[1][0][fork, 2 * UNIT - 1].eq(9).all()
        check_contents(cache, slot, range(3 * UNIT))
        check_contents(cache, fork, range(2 * UNIT - 1))
