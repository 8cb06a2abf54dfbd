"""After fork(2) (I13) the child has no access: every operation of ours, and of torch's on a VTensor, raises
and names the remedy; a view faults, and is explained; no write, deleter or exit of the child reaches the
parent, which pays nothing."""

from __future__ import annotations

import pytest

from cuda_support import needs_simcuda
from support import run_snippet

# The parent makes objects of every kind, forks, and lets the child run `child()`; both then check.
PARENT = """
import vtensor.together
import copy, dataclasses, io, multiprocessing, pickle, signal, time
import numpy
from operations import OPERATIONS, TORCH_OPERATIONS
torch.set_num_threads(1)  # torch's own threads do not come through a fork
pool = open_pool("host", 128)
t = filled(pool, 9, 5, rows=(2,))
view = t[:, 2:7]
array = t[0].numpy()
parent_of = filled(pool, 10, 6)
shared = parent_of.fork()          # pages of these two are copy-on-write
shared[3] = 6                      # and this one the kernel has copied
closing = filled(pool, 5, 7)
orphan = closing[1:3]
closing.close()                    # only the view holds it
released = filled(pool, 5, 7); released.close()  # pages whose memory the pool keeps
default = vtensor.zeros(3, 4, grow_dim=0, capacity=100)
cache = vtensor.KVCache(num_layers=2, num_kv_heads=1, head_dim=16, max_batch=2, max_len=256,
                        dtype=torch.float32, pool=pool)
slot = cache.alloc()
assert cache.step([20, 0])
key = cache[0][0]
key[slot, :20] = 4
arena = vtensor.Arena(16 * pool.page_size, pool=pool)
blocks = vtensor.Blocks(arena, 8, [(0, pool.page_size, pool.page_size)])
blocks.hold([0, 1])
flat = arena.tensor
flat[: 2 * pool.page_size] = 3
linear = torch.nn.Linear(4, 4)
vtensor.adopt(linear, pool)
weight = linear.weight.detach().clone()

def contents():
    return (t.eq(5).all() and view.eq(5).all() and (array == 5).all() and parent_of.eq(6).all()
            and shared.eq(6).all() and orphan.eq(7).all() and not default.any()
            and key[slot, :20].eq(4).all() and flat[: 2 * pool.page_size].eq(3).all()
            and linear.weight.eq(weight).all())

def reap(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fork(child):
    "The pid of a child that runs `child` and leaves, within 30 s."
    if pid := os.fork():
        return pid
    signal.alarm(30)
    try:
        child()
    except BaseException:
        import traceback
        traceback.print_exc(); sys.stderr.flush()
        os._exit(70)
    os._exit(0)

def paused(child=lambda: None):
    "A child that waits, and what lets it run `child`."
    wake, ready = os.pipe()
    def wait():
        os.close(ready)
        os.read(wake, 1)
        child()
    pid = fork(wait)
    os.close(wake)
    return pid, lambda: os.write(ready, b"x")

def go_on():
    "Everything the parent had is there, and every operation works on."
    assert contents()
    testing.check_invariants(pool)
    t.extend(9); t.append(torch.full((2, 3, t.shape[2]), 5, dtype=t.dtype)); t.shrink(12)
    f = t.fork(); f.fill_(8); parent_of.fill_(6); shared.extend(1).truncate(10)
    assert contents() and f.eq(8).all()
    r = f.reallocate(100); r.reindex([1, 0]); assert r.eq(8).all(); r.close()
    fresh = quarter(pool, 20); assert not fresh.any(); fresh.close()
    default.extend(20); assert not default.any(); default.truncate(3)
    assert cache.step([60, 0]); cache.truncate(slot, 20)
    testing.check_invariants(pool)

def close_all():
    global view, array, orphan, key, flat, linear
    for x in (t, parent_of, shared, default, cache, arena): x.close()
    view = array = orphan = key = flat = linear = None
    gc.collect()

def refusal(code):
    try:
        eval(code)
    except vtensor.VTensorError as error:
        return str(error)
    return "nothing was refused"

x = torch.zeros(2, 1, 1024, dtype=torch.uint8)
kv = torch.zeros(2, 1, 1, 16)
shape = dict(num_layers=1, num_kv_heads=1, head_dim=16, max_batch=1, max_len=64, dtype=torch.float32)
NAMES = "t view array parent_of shared orphan default cache key arena flat blocks linear pool".split()

def forget_all():
    globals().update(dict.fromkeys(NAMES))
    gc.collect()
"""

END = """
go_on()
close_all()
pool.wait_idle(); pool.trim()  # and what it keeps for later tensors
stats = pool.stats()
assert (stats.pages_used, stats.pages_mapped) == (0, 0), stats
pool.close()
assert memfds() == 1  # the default pool's
"""


def check(code: str, **options):
    """Runs the code in the parent, which must be as it was then."""
    return run_snippet(PARENT + code + END, **options).check()


AFTER_A_FORK = {
    "every operation names the remedy": """
def child():
    core = pool._core
    made = core.driver_calls()
    for again in range(2):  # nothing was half done
        for code in OPERATIONS:
            said = refusal(code)
            assert said.startswith("[") and "forked" in said and "clone() before" in said, (code, said)
    assert not t.closed and not pool.closed and not cache.closed and not arena.closed
    forget_all()
    assert core.driver_calls() == made
assert reap(fork(child)) == 0
""",
    "every torch operation on a VTensor names the remedy": """
def child():
    global t
    for t in (t, shared, default):
        for code in TORCH_OPERATIONS:
            said = refusal(code)
            assert "forked" in said and "clone() before" in said, (code, said)
    for strategy in ("file_descriptor", "file_system"):
        torch.multiprocessing.set_sharing_strategy(strategy)
        for code in ("multiprocessing.SimpleQueue().put(view)", "multiprocessing.SimpleQueue().put(key)"):
            assert "clone()" in refusal(code)  # as it is in the parent
assert reap(fork(child)) == 0
""",
    # Logs, debuggers and failed assertions show objects.
    "what reads no memory answers": """
def child():
    assert t.length == 9 and t.capacity == 64 and t.grow_dim == 1 and not t.closed and t.pool is pool
    assert "9 of 64 positions" in repr(t) and repr(closing) == "<VTensor, closed>" and repr(pool)
    assert "VTensor" in t._repr_html_() and "Pool" in pool._repr_html_()
    assert "of another process" in repr(cache) and "of another process" in repr(arena) and repr(blocks)
    assert len(cache) == 2 and pool.page_size == 4096
assert reap(fork(child)) == 0
""",
    "allocations never lie where the parent's memory was": """
begin, end = t.address, t.address + t.nbytes_reserved
def child():
    assert all(flags == "---p" for _, _, flags in mappings_within(begin, end))
    made = [torch.ones(1 << 20) for _ in range(64)]
    assert all(flags == "---p" for _, _, flags in mappings_within(begin, end))
    assert not any(begin <= x.data_ptr() < end for x in made)
    del made
assert reap(fork(child)) == 0
""",
    "a child of a child": """
def child():
    def grandchild():
        assert "forked" in refusal("t.extend(1)") and "forked" in refusal("t + 1")
        view.sum()
    os.dup2(os.open("/dev/null", os.O_RDWR), 2)
    assert reap(fork(grandchild)) == -signal.SIGSEGV
assert reap(fork(child)) == 0
""",
    "the report leaves a parent without one as it is": """
vtensor.explain_faults(False); faulthandler.disable()
caught = lambda: open("/proc/self/status").read().split("SigCgt:")[1].split()[0]
before = caught()
assert reap(fork(lambda: None)) == 0
assert caught() == before
""",
    # No driver call, no page, no kernel mapping, no descriptor; and its pages are written in place.
    "the parent pays nothing": """
def state():
    stats = dataclasses.asdict(pool.stats())
    [calls.pop("pagemap", None) for calls in stats["driver_calls"].values()]  # those of stats() itself
    mappings = [line for line in open("/proc/self/maps") if "memfd" in line]
    pages = [[(r.page_id, r.shared, r.state) for r in x.pages()] for x in (t, parent_of, arena)]
    return stats, mappings, pages
assert contents()
before, files = state(), open_files()
children = [paused() for _ in range(3)]
assert open_files() == files + 3  # the test's own ends
assert state() == before, (state(), before)
t.fill_(5); flat[: 2 * pool.page_size] = 3; default.zero_(); key[slot, :20] = 4; orphan.fill_(7)
assert state() == before, (state(), before)
for pid, go in children:
    go()
    assert reap(pid) == 0
assert state() == before
""",
    "what sleeps is not for the child either": """
pool.sleep(contents="host")
def child():
    for code in OPERATIONS + TORCH_OPERATIONS:
        assert "forked" in refusal(code), (code, refusal(code))
    forget_all()
assert reap(fork(child)) == 0
pool.wake()
""",
    # By finalizers too: deleters and exit handlers in the child touch nothing.
    "the child leaves normally": """
LEAVING = {
    "os._exit(0)": 0,
    "sys.exit(0)": 0,
    "sys.exit(3)": 3,
    "raise SystemExit": 0,
    "raise ValueError('as meant')": 1,
}
for leave, expected in LEAVING.items():
    if pid := os.fork():
        assert (code := reap(pid)) == expected, (leave, code)
    else:
        signal.alarm(30)
        assert t.length == 9
        exec(leave)
""",
}


@pytest.mark.parametrize("what", AFTER_A_FORK)
def test_after_a_fork(what):
    check(AFTER_A_FORK[what])


# What a child touches, and what the report names.
TOUCHED = {
    "view.sum()": "a read to position",
    "view.zero_()": "a write to position",
    "array.sum()": "a read to position",
    "orphan.sum()": "a read to position",
    "shared_view.sum()": "a read to position",
    "key[slot, :20].sum()": "layer 0",
    "flat[5].item()": "byte 5 of the arena",
    "linear(torch.ones(1, 4))": "a read to byte",
}


def test_a_view_faults_in_the_child_and_is_explained():
    """Although the parent has explain_faults() off."""
    done = check(
        f"""
shared_view = shared[:]
vtensor.explain_faults(False)
os.dup2(os.open("/dev/null", os.O_RDWR), 1)
for touch in {list(TOUCHED)}:
    print("case:", touch, file=sys.stderr, flush=True)
    pid = fork(lambda: eval(touch))
    assert (code := reap(pid)) == -signal.SIGSEGV, (touch, code)
shared_view = None
"""
    )
    for report, (touch, named) in zip(done.err.split("case: ")[1:], TOUCHED.items(), strict=True):
        where, why = report.split("vtensor: ")[1:]
        assert report.startswith(touch) and "SIGSEGV" in where and named in where, report
        assert why.startswith("this process was forked") and "clone() before the fork" in why, report


def test_the_child_keeps_none_of_the_parents_memory():
    """While it lives, the parent's pool uses its whole budget, and what the parent gives back goes."""
    run_snippet(
        PARENT
        + """
import fcntl
def child():
    assert memfds() == 0, os.listdir("/proc/self/fd")
    assert not [line for line in open("/proc/self/maps") if "memfd" in line]
fd = next(int(n) for n in os.listdir("/proc/self/fd") if "memfd" in os.readlink(f"/proc/self/fd/{n}"))
assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC  # nor do programs that it starts
pid, go = paused(child)
go_on()
close_all(); pool.trim()
others = [filled(pool, 4, 200) for _ in range(128)]  # takes whatever there is
assert pool.stats().pages_free == 0 and all(o.eq(200).all() for o in others)
for o in others: o.close()
pool.trim()
assert os.fstat(fd).st_blocks == 0
pool.close()
go()
assert reap(pid) == 0
"""
    ).check()


def test_no_child_keeps_the_memory_of_a_pool_that_is_just_made_or_closed():
    run_snippet(
        PARENT
        + """
import threading
stop = threading.Event()
def make():
    while not stop.is_set(): open_pool("host", 4).close()
makers = [threading.Thread(target=make, daemon=True) for _ in range(2)]
for maker in makers: maker.start()
def child():
    assert memfds() == 0, os.listdir("/proc/self/fd")
assert [reap(fork(child)) for _ in range(40)] == [0] * 40
stop.set()
for maker in makers: maker.join(20)
"""
    ).check()


def test_sleeping_contents_do_not_stay_with_a_child(tmp_path):
    """The file in a folder has no name: a child with its descriptor or its mapping would keep its bytes."""
    check(
        f"""
pool.sleep(contents={str(tmp_path)!r}, tag="tensors")
def sizes():
    files = [file for n in os.listdir("/proc/self/fd") if os.path.exists(file := f"/proc/self/fd/{{n}}")]
    return [os.stat(file).st_size for file in files if os.readlink(file).startswith({str(tmp_path)!r})]
assert [size > 0 for size in sizes()] == [True]
def child():
    assert sizes() == [] and {str(tmp_path)!r} not in open("/proc/self/maps").read()
    assert "forked" in refusal("t + 1") and "forked" in refusal("pool.wake()")
assert reap(fork(child)) == 0
pool.wake()
assert sizes() == []
"""
    )


def test_the_child_falls_off_the_end():
    run_snippet(
        PARENT
        + """
if pid := os.fork():
    assert (code := reap(pid)) == 0, code
    go_on()
else:
    signal.alarm(30)
    del view, array, orphan
""",
        finalize=True,
    ).check()


@pytest.mark.parametrize("ahead", [0, 1 << 16], ids=["caller", "mapper"])
def test_fork_while_other_threads_work(ahead):
    """The pool's lock may be held by a thread that the child does not have, and its tables half changed: the
    child waits for nothing, and ends nothing, whichever thread has forked."""
    run_snippet(
        PARENT.replace('open_pool("host", 128', f'open_pool("host", 128, prefetch={ahead}, cache=0')
        + """
import threading
stop = threading.Event()
def work(n):
    while not stop.is_set():
        x = quarter(pool, 3); x.fill_(n); x.prepare(9); x.extend(4); x.fork().fill_(1); x.shrink(3); x.close()
def serve():
    while not stop.is_set():
        cache.step([60, 0]); cache.truncate(slot, 20)
        arena.map([(40000, 50000)]); arena.unmap([(40000, 50000)])
threads = [threading.Thread(target=work, args=(i,)) for i in range(2)] + [threading.Thread(target=serve)]
for thread in threads: thread.start()
def child():
    for code in OPERATIONS + TORCH_OPERATIONS:
        assert "forked" in refusal(code), code
    forget_all()
reaped = []
def fork_often():
    for i in range(12):
        reaped.append(reap(fork(child)))
        time.sleep(0.002)
forking = threading.Thread(target=fork_often)
forking.start(); forking.join()
fork_often()
assert reaped == [0] * 24
stop.set()
for thread in threads: thread.join(20)
"""
        + END
    ).check()


def test_a_data_loader_with_forked_workers_beside_a_live_cache():
    """Its batches arrive while the cache and a tensor grow. A dataset over a VTensor is refused in a
    sentence, one over a clone works."""
    check(
        """
from torch.utils.data import DataLoader, TensorDataset, Dataset
class Rows(Dataset):
    def __init__(self, rows): self.rows = rows
    def __len__(self): return 9
    def __getitem__(self, i): return self.rows[:, i].float()
plain = torch.arange(512.0).reshape(128, 4)
options = dict(num_workers=2, multiprocessing_context="fork", timeout=30)
seen = []
for i, (batch,) in enumerate(DataLoader(TensorDataset(plain), batch_size=8, **options)):
    seen.append(batch)
    assert cache.step([20 + i, 0])
    default.extend(1)
    assert contents()
assert torch.equal(torch.cat(seen), plain)
default.truncate(3)
copies = torch.cat(list(DataLoader(Rows(t.clone()), batch_size=3, **options)))
assert torch.equal(copies, torch.full((9, 2, 1024), 5.0))
try:
    list(DataLoader(Rows(t), batch_size=3, **options))
    raise AssertionError("it was not refused")
except vtensor.VTensorError as error:
    assert "clone() before the fork" in str(error)
    error.__traceback__ = None  # it keeps the loader, which takes 10 s to end in gc.collect()
""",
        timeout=90,
    )


def test_a_child_of_a_parent_without_pools_makes_its_own():
    """As does the parent, whose own children then have no access."""
    run_snippet(
        """
        import threading
        from vtensor import pool as pools

        def work():
            t = vtensor.zeros(3, 4, grow_dim=0, capacity=9)
            assert not t.extend(2).add_(1).eq(0).any() and t.length == 5
            with vtensor.KVCache(1, 2, 8, max_batch=2, max_len=16) as cache:
                cache.alloc()

        def child(code):
            if pid := os.fork():
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            try:
                code()
                os._exit(0)
            except vtensor.VTensorError as error:
                os._exit(3 if "clone() before the fork" in str(error) else 4)
            except BaseException:
                os._exit(5)

        held, go_on = threading.Event(), threading.Event()

        def hold():
            with pools._default_pools_lock, pools._heaps_lock:  # as a thread does that makes the first pool
                held.set()
                go_on.wait()

        for made, code in ((False, 0), (True, 3)):
            if made:
                work()
            held.clear(), go_on.clear()
            thread = threading.Thread(target=hold)
            thread.start()
            held.wait()
            assert child(work) == code
            go_on.set()
            thread.join()
        """
    ).check()


@needs_simcuda
def test_a_pool_of_a_device_refuses_in_the_child_too():
    on_a_device = PARENT.replace('open_pool("host"', 'open_pool("simcuda"')
    refused = [code for what, code in AFTER_A_FORK.items() if "names the remedy" in what]
    run_snippet(on_a_device + "\n".join(refused) + "go_on(); close_all(); pool.close()").check()
