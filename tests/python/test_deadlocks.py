"""The interleavings that deadlock careless libraries, each in a process with a time limit (I11 to I14)."""

from __future__ import annotations

import pytest

from cuda_support import needs_simcuda
from support import check_endings, run_snippet

# A pool of the host, or of a device on which kernels run that unmap and set-access wait for.
POOLS = {
    "host": "pool = vtensor.Pool('cpu', page_size=PAGE, budget=16384 * PAGE)\n",
    "busy_device": "pool = open_pool('simcuda', 16384, prefetch=None, patience=20)\n",
}
SETUPS = {
    "host": "",
    "busy_device": """
from stream_support import busy_device
simcuda_control().cuInit(0)
busy = busy_device()
busy.__enter__()
""",
}
DEVICES = pytest.mark.parametrize("device", ["host", pytest.param("busy_device", marks=needs_simcuda)])
# A pool's mapper is kept busy: pages ahead, cached tensors, and something always on its way out.
BUSY = r"""
import threading, time, warnings
# Python from 3.12 on says so at every fork beside threads, which is what these tests are about.
warnings.filterwarnings("ignore", r"This process \(pid=\d+\) is multi-threaded, use of f", DeprecationWarning)
torch.set_num_threads(1)
PAGE = 4096
stop = threading.Event()
failed = []

def thread(body):
    def run():
        try:
            while not stop.is_set():
                body()
        except vtensor.Closed:
            pass
        except BaseException as error:
            failed.append(repr(error))
    started = threading.Thread(target=run, daemon=True)
    started.start()
    return started

def grow():
    t = quarter(pool, 2, rows=(2,), capacity=400)
    t.fill_(5)
    views = []
    for _ in range(20):
        t.prepare(40)
        views.append(t[:, -1:])
        t.extend(7)
        t.shrink(3)
    assert t[:, :2].eq(5).all() and views[0].eq(5).all()

def join(threads):
    stop.set()
    for t in threads:
        t.join(20)
        assert not t.is_alive(), "a thread is stuck"
    assert not failed, failed[0]
"""


def check(code: str, *, device: str = "host", finalize: bool = False, timeout: float = 60.0) -> None:
    setup = BUSY + SETUPS[device] + POOLS[device]
    finished = run_snippet(setup + code, finalize=finalize, timeout=timeout).check()
    assert finished.err == "", finished.err


# What goes on beside threads that grow and a busy mapper.
BESIDE = {
    "deleters under the GIL": """
handed = []

def make():
    t = filled(pool, 8, 3, capacity=4000)
    for _ in range(50):
        t.prepare(100)
        t.extend(5)
        handed.append(t[-2:])
        t.shrink(2)

def drop():
    while handed:
        handed.pop()
    time.sleep(0)

threads = [thread(make), thread(drop), thread(drop), thread(grow)]
time.sleep(0.4)
join(threads)
handed.clear()
pool.wait_idle(10)
testing.check_invariants(pool)
assert pool.stats().tensors == 0
""",
    "a finalizer that closes, grows and drops inside other operations": """
class Node:
    def __init__(self):
        self.me = self
        self.t = filled(pool, 3)
        self.view = self.t[:2]
    def __del__(self):
        self.t.prepare(20)
        self.t.extend(1)
        self.t.close()
        pool.stats()

def churn():
    Node()
    grow()

gc.set_threshold(5, 1, 1)
threads = [thread(churn), thread(grow)]
time.sleep(0.4)
join(threads)
""",
    "pool operations": """
def tell():
    pool.budget = pool.budget
    pool.trim()
    pool.stats()
    pool.wait_idle(10)

threads = [thread(grow), thread(grow), thread(tell), thread(tell)]
time.sleep(0.4)
join(threads)
pool.close()
""",
}


@DEVICES
@pytest.mark.parametrize("what", BESIDE)
def test_beside_a_busy_mapper(what, device):
    """A deleter runs with the GIL held, on any thread; it waits for neither mapper nor grower."""
    check(BESIDE[what], device=device)


# A pool of its own for each, whose mapper is at work.
KEPT_ALIVE = {
    "live_views": "t = filled(pool, 20, 3); v = t[2:4]; t.prepare(30); n = v.numpy()",
    "a_view_in_a_cycle": "t = filled(pool, 20, 3); c = [t[2:4], t]; c.append(c); t.prepare(30); del t",
    "the_pool_dropped": "t = filled(pool, 20, 3); t.prepare(30); v = t[:1]; del pool, t",
    "an_error_not_told": """
t = filled(pool, 20, 3)
with testing.fail_after(pool, 0, 1000):
    t.prepare(40); time.sleep(0.02)
""",
}


@DEVICES
def test_exit_with_objects_kept_alive(device):
    codes = {name: POOLS[device] + code for name, code in KEPT_ALIVE.items()}
    check_endings(codes, setup=BUSY + SETUPS[device], timeout=60)


EXITS = {
    "while_it_maps": "t = quarter(pool, 1, capacity=60000); t.prepare(59999)",
    "while_it_gives_back": "t = filled(pool, 20000, capacity=20000); v = t[:4]; t.shrink(19000)",
    "while_it_zeroes": "filled(pool, 16000, capacity=20000).close()",
    "with_growing_threads": "for _ in range(3): thread(grow)\ntime.sleep(0.1)",
    "with_threads_inside_torch": """
arena = vtensor.Arena(4000 * PAGE, pool=pool)
arena.map([(0, arena.nbytes)])
cache = vtensor.KVCache(1, 8, 64, 1, 2000, torch.float32, pool=pool)
cache.alloc()
cache.step([2000])
t = vtensor.zeros(4000, 1024, grow_dim=0, capacity=4000, pool=pool)
a, k = arena.tensor.view(torch.float32), cache[0][0]
thread(lambda: t.cos_())
thread(lambda: (arena.stats(), a.cos_()))
thread(lambda: (cache.stats(), k.cos_()))
time.sleep(0.1)
assert not failed
""",
    "with_a_thread_that_waits": "thread(grow); thread(lambda: pool.wait_idle(10)); time.sleep(0.1)",
    "with_threads_that_come_back_late": """
vtensor.pool._FAREWELL_SECONDS = 0
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.3)
import sys
sys.slow = Slow()  # goes while the interpreter ends
for _ in range(3):
    thread(lambda: pool.wait_idle(10))
time.sleep(0.1)
""",
}


@DEVICES
@pytest.mark.parametrize("ending", EXITS)
def test_exit(ending, device):
    check(EXITS[ending], device=device, finalize=True)


SIGNAL = """
import signal
def ring(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, ring)

def interrupted(wait, most):
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    try:
        wait()
        while time.monotonic() - began < most:
            time.sleep(0.01)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("the signal was lost")
    assert time.monotonic() - began < most  # the wait had a bound of its own
"""


def test_a_signal_while_another_thread_has_the_tensor():
    """Ctrl-C comes once the wait is over; the tensor is whole, and the mapper's thread takes no signal."""
    check(
        SIGNAL
        + """
t = quarter(pool, 1, rows=(8,), capacity=4000)

def push():
    x = torch.ones(8, 50, t.shape[2], dtype=t.dtype)
    t.append(x)
    t.shrink(49)

threads = [thread(push), thread(grow)]
def wait():
    while True:
        t.prepare(1000)
        t.extend(0)
        pool.wait_idle(10)
interrupted(wait, 15)
join(threads)
t.extend(1)
testing.check_invariants(pool)
"""
    )


@needs_simcuda
def test_a_signal_while_the_device_is_waited_for():
    """The wait ends in its own time (I12), then the signal comes; the next call works."""
    check(
        SIGNAL
        + """
device = open_pool("simcuda", 64, patience=20)
control = simcuda_control()
every = ctypes.c_uint64(2**64 - 1)
t = filled(device, 40)
control.simcuda_hold(every)
t.shrink(20)
def wait():
    try:
        device.wait_idle(1)
    except vtensor.TimedOut:
        pass
interrupted(wait, 15)
assert device.stats().pages_pinned == 5
control.simcuda_release(every)
device.wait_idle(10)
assert device.stats().pages_pinned == 0
t.extend(4)
device.close()
"""
    )
