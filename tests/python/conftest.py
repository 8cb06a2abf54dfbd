"""Pools for the tests, a bound on each test's time, and a check that each test leaves nothing behind."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, Phase, settings

import vtensor
from kv_support import make_cache
from stream_support import SimulatedDevice
from support import (
    DEFAULT_POOLS,
    memfd_mappings,
    memfds,
    open_pool,
    simcuda_disarm,
    simcuda_leaks,
    simcuda_library,
    within,
)
from vtensor import testing

KINDS = ("host", "simcuda")
TEST_SECONDS = 120

# "ci" gives the same examples each time, and a failure as it was found; VTENSOR_HYPOTHESIS=soak looks for new
# ones, and for the shortest that fails, for as long as it takes.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    max_examples=100,
    stateful_step_count=50,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=2000,
    stateful_step_count=80,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile(os.environ.get("VTENSOR_HYPOTHESIS", "ci"))


def pytest_configure(config):
    config.addinivalue_line("markers", "seconds(n): the most time the test may take")
    config.addinivalue_line("markers", "slow: `make check` runs it, `make test` does not")
    config.addinivalue_line("markers", "thorough: `make check` runs it again, with more cases")
    config.addinivalue_line("markers", "alone: it times something, so no other test runs beside it")
    config.addinivalue_line("markers", "keeps_pages: it may leave pages in the default pool")
    config.addinivalue_line("markers", "exact: it counts pages, as they are without look-ahead and reuse")
    if not faulthandler.is_enabled():
        faulthandler.enable()


def pytest_collection_modifyitems(config, items):
    if not DEFAULT_POOLS:
        return
    exact = [item for item in items if item.get_closest_marker("exact")]
    config.hook.pytest_deselected(items=exact)
    items[:] = [item for item in items if not item.get_closest_marker("exact")]


def pytest_collection_finish(session):
    if simcuda_library() is not None:
        simcuda_leaks()  # loads the library, whose own memfd stays
    leave_out_of_collections()


def leave_out_of_collections():
    """What lives now was imported, and never dies: collections need not look at it. They took a third of a
    second once all tests had run."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Ends a test that runs past its time: by an exception first, and if C code sits on it, for good."""
    marker = item.get_closest_marker("seconds")
    seconds = marker.args[0] if marker else TEST_SECONDS
    if os.environ.get("VTENSOR_HYPOTHESIS") == "soak":
        seconds = 24 * 3600

    def give_up(signum, frame):
        raise TimeoutError(f"the test ran past {seconds} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(seconds + 30, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        faulthandler.cancel_dump_traceback_later()
    if nextitem is not None and nextitem.path != item.path:
        leave_out_of_collections()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if call.when == "call":
        item.failed_call = report.failed


def nothing_left(left):
    """What `left()` finds; with the garbage collected first, where that makes a difference, and once a mapper
    that is at work has let its pool go."""
    if left():
        gc.collect()
        within(10.0, lambda: not left())
    return left()


@pytest.fixture(autouse=True)
def nothing_leaks(request):
    """I14: after the test no pages of the default pool, mappings or memfds are left that it added."""
    default = vtensor.default_pool("cpu")
    before = default.stats()
    descriptors = memfds()
    yield
    if getattr(request.node, "failed_call", True):
        return  # the traceback keeps the test's locals alive

    def left():
        default.trim()  # what freed tensors left for the next one is no leak
        after = default.stats()
        keeps = request.node.get_closest_marker("keeps_pages") is not None
        found = {
            "memfds": memfds() - descriptors,
            "pages of the default pool": 0 if keeps else after.pages_used - before.pages_used,
            "reserved bytes": 0 if keeps else after.nbytes_reserved - before.nbytes_reserved,
        }
        return {what: n for what, n in found.items() if n > 0}

    assert not nothing_left(left)


def counts_of(pool) -> dict[str, int]:
    pool._close_heaps()  # what was adopted and freed has left addresses
    pool.trim()  # what freed tensors left for the next one is no leak
    pool.wait_idle(timeout=10)
    stats = pool.stats()
    names = ("pages_used", "pages_mapped", "nbytes_reserved", "tensors")
    return {name: getattr(stats, name) for name in names if getattr(stats, name)}


def require_built(kind: str) -> None:
    if kind == "simcuda" and simcuda_library() is None:
        pytest.skip("libsimcuda.so is not built (set VTENSOR_SIMCUDA to its path)")


@pytest.fixture
def pool_factory(request):
    """Makes pools by kind, and at the end checks that each is empty (I14) and sound (I5), and closes it."""
    default = vtensor.default_pool("cpu")
    default.trim()
    mappings = memfd_mappings()
    opened = []

    def make(kind: str, pages: int = 64, **kw):
        require_built(kind)
        pool = open_pool(kind, pages, **kw)
        opened.append(pool)
        return pool

    yield make
    failed = getattr(request.node, "failed_call", True)
    unmade = simcuda_disarm()
    assert failed or unmade == 0, f"{unmade} refusals were asked of the simulated libcuda and not met"
    for pool in opened:
        if not failed and not pool.closed:
            testing.check_invariants(pool)
            assert not nothing_left(lambda pool=pool: counts_of(pool))
        pool.close()
    if not failed:
        if simcuda_library() is not None:
            opened.clear()
            assert not nothing_left(simcuda_leaks)
        default.trim()
        assert memfd_mappings() <= mappings, "mappings of a memfd are left"


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    require_built(request.param)
    return request.param


@pytest.fixture
def pool(pool_factory, kind):
    """64 pages of 4 KiB, of the host and of the simulated libcuda in turn."""
    return pool_factory(kind)


@pytest.fixture
def cache(pool_factory, kind):
    """Over 400 pages of either kind: kv_support's "layers"."""
    with make_cache(pool_factory(kind, 400)) as made:
        yield made


@pytest.fixture
def host_cache(pool_factory):
    """Likewise over host pages."""
    with make_cache(pool_factory("host", 400)) as made:
        yield made


@pytest.fixture
def host(pool_factory):
    """64 host pages of 4 KiB."""
    return pool_factory("host")


@pytest.fixture
def pages(pool_factory):
    """4,096 host pages of 4 KiB: of tiny_models' Llama, 64 tokens of one head each."""
    return pool_factory("host", pages=4096)


@pytest.fixture
def strict():
    """800 host pages whose holes fault on reads too: what reads or writes one ends the process."""
    with testing.host_pool(page_size=4096, budget=4096 * 800) as pool:
        yield pool


@pytest.fixture
def leases(monkeypatch):
    """What vtensor.lease is given, as ids, and the end of each; it leases nothing."""
    held = []

    @contextlib.contextmanager
    def lease(*tensors, stream=None):
        held.append([id(t) for t in tensors])
        yield
        held.append("ended")

    monkeypatch.setattr(vtensor, "lease", lease)
    return held


@pytest.fixture(scope="module")
def llama():
    """The tiny Llama, whose attention is SDPA."""
    from tiny_models import make_llama  # needs transformers

    return make_llama("sdpa")


@pytest.fixture
def simcuda(pool_factory):
    """64 pages of 4 KiB of the simulated libcuda."""
    return pool_factory("simcuda")


@pytest.fixture
def sim(pool_factory):
    """The simulated device's streams and kernels. What was held back runs before the pools are closed; a
    kernel that found its memory gone fails the test."""
    if simcuda_library() is None:
        pytest.skip("libsimcuda.so is not built (set VTENSOR_SIMCUDA to its path)")
    device = SimulatedDevice()
    yield device
    illegal = device.end()
    assert illegal == 0, f"{illegal} kernels found their memory unmapped or replaced"


@pytest.fixture
def stream_pool(sim, pool_factory):
    """Makes pools over the simulated device, whose waits are bounded; closes them at the end."""
    made = []

    def make(pages=64, *, patience=20.0, **options):
        pool = pool_factory("simcuda", pages, patience=patience, **options)
        made.append(pool)
        return pool

    yield make
    sim.let_go()
    for pool in made:
        pool.close()
