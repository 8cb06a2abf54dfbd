"""After fork(2) (I13): the child sees a private snapshot, cannot reach the parent's memory by any write,
deleter or exit, gets a clear error from every operation of ours, and leaves normally."""

from __future__ import annotations

import pytest

from support import run_snippet, simcuda_library

# The parent makes tensors of every kind, forks, and lets the child run `child()`; both then check.
PARENT = """
import multiprocessing, signal, time
torch.set_num_threads(1)  # torch's own threads do not come through a fork
pool = open_pool("host", 64)
t = filled(pool, 9, 5, rows=(2,))
view = t[:, 2:7]
array = t[0].numpy()
parent_of = filled(pool, 10, 6)
shared = parent_of.fork()          # pages of these two are copy-on-write
closing = filled(pool, 5, 7)
orphan = closing[1:3]
closing.close()                    # only the view holds it
released = filled(pool, 5, 7); released.close()  # pages whose memory the pool keeps
default = vtensor.zeros(3, 4, grow_dim=0, capacity=100)

def contents():
    return (t.eq(5).all() and view.eq(5).all() and (array == 5).all() and parent_of.eq(6).all()
            and shared.eq(6).all() and orphan.eq(7).all() and not default.any())

def reap(pid):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)
    raise AssertionError("the child did not end")

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
    testing.check_invariants(pool)

def operations(t):
    x = torch.zeros(2, 1, t.shape[2], dtype=t.dtype)
    return {
        "extend": lambda: t.extend(1), "append": lambda: t.append(x), "shrink": lambda: t.shrink(1),
        "shrink_front": lambda: t.shrink(1, front=True), "truncate": lambda: t.truncate(1),
        "reallocate": lambda: t.reallocate(100), "fork": lambda: t.fork(), "unshare": lambda: t.unshare(0, 1),
        "reindex": lambda: t.reindex([1, 0]), "close": lambda: t.close(), "alias": lambda: t.alias(),
        "pages": lambda: t.pages(), "prepare": lambda: t.prepare(1),
        "deepcopy": lambda: __import__("copy").deepcopy(t),
        "empty": lambda: quarter(pool, 1), "empty_like": lambda: vtensor.empty_like(t),
        "zeros_in_default": lambda: vtensor.zeros(2, 3, grow_dim=0, capacity=9),
        "from_tensor": lambda: vtensor.from_tensor(x, 1, 9, pool=pool),
        "stats": lambda: pool.stats(), "prefill": lambda: pool.prefill(4096), "trim": lambda: pool.trim(),
        "wait_idle": lambda: pool.wait_idle(timeout=1), "pool_close": lambda: pool.close(),
        "new_pool": lambda: vtensor.Pool("cpu", page_size=4096, budget=1 << 20),
    }
"""

FORK = """
pid = os.fork()
if pid == 0:
    try:
        child()
    except BaseException:
        import traceback
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)
    {leave}
assert reap(pid) == {code}
go_on()
for x in (t, parent_of, shared, default): x.close()
view = array = orphan = None
gc.collect()
assert pool.stats().pages_used == 0
pool.close()
"""


def run_fork(child: str, leave: str = "os._exit(0)", code: int = 0, after: str = ""):
    run_snippet(PARENT + child + FORK.format(leave=leave, code=code) + after).check()


def test_the_child_reads_what_the_parent_had():
    run_fork(
        """
def child():
    assert contents()
    assert torch.equal(t + 1, torch.full_like(t.clone(), 6)) and t[0].sum() == 5 * t[0].numel()
    assert repr(t) and t.length == 9 and t.capacity == 64 and not t.closed and t.tolist()
"""
    )


def test_the_childs_writes_stay_in_the_child():
    run_fork(
        """
def child():
    t.fill_(1); view[:, 1] = 2; array[0] = 3; parent_of.zero_(); shared.add_(1); orphan.zero_()
    default.fill_(9)
    torch.add(t, 1, out=view.new_empty(t.shape))
    assert t[1, 0].eq(1).all() and view[:, 1].eq(2).all() and array[0, 0] == 3 and not orphan.any()
    assert shared.eq(7).all() and not parent_of.any() and default.eq(9).all()  # apart in the child too
"""
    )


def test_the_childs_writes_stay_in_the_child_where_the_parent_could_not_guard_its_pages():
    run_snippet(
        PARENT
        + """
with testing.fail_after(pool, 0, 1000):
    pid = os.fork()
if pid == 0:
    try:
        assert contents()
        t.fill_(1); view[:, 1] = 2; parent_of.zero_(); shared.add_(1); orphan.zero_()
        assert t[0, 0].eq(1).all() and view[:, 1].eq(2).all() and shared.eq(7).all() and not parent_of.any()
    except BaseException:
        import traceback
        traceback.print_exc(); sys.stderr.flush()
        os._exit(70)
    os._exit(0)
assert reap(pid) == 0
go_on()
for x in (t, parent_of, shared, default): x.close()
view = array = orphan = None
assert pool.stats().pages_used == 0
pool.close()
"""
    ).check()


def test_the_parents_writes_stay_in_the_parent():
    run_snippet(
        PARENT
        + """
to_child, from_parent = os.pipe()
pid = os.fork()
if pid == 0:
    os.close(from_parent)
    try:
        os.read(to_child, 1)  # until the parent has written
        assert contents()
        # Pages that the parent gave back, handed on and had zeroed since are still what they were here.
        t.add_(1); assert view.eq(6).all()
    except BaseException:
        import traceback
        traceback.print_exc(); sys.stderr.flush()
        os._exit(70)
    os._exit(0)
kept = t.clone()
t.fill_(1); view.fill_(2); parent_of.fill_(3); shared.fill_(4); orphan.fill_(9); default.fill_(9)
t.shrink(5); t.fork(); pool.trim()
quarter(pool, 20).fill_(200)
os.write(from_parent, b"x")
assert reap(pid) == 0
pool.close()
"""
    ).check()


def test_the_child_keeps_what_it_saw_though_the_parent_gives_the_pages_to_others():
    run_snippet(
        PARENT
        + """
wake, ready = os.pipe()
pid = os.fork()
if pid == 0:
    os.close(ready)
    try:
        os.read(wake, 1)
        assert contents()
    except BaseException:
        import traceback
        traceback.print_exc(); sys.stderr.flush()
        os._exit(70)
    os._exit(0)
stats = pool.stats()
assert stats.pages_in_children > 0
for x in (t, parent_of, shared, default): x.close()
view = array = orphan = None
gc.collect()
pool.trim()
others = [filled(pool, 4, 200) for i in range(10)]  # takes whatever is free
assert all(o.eq(200).all() for o in others)
testing.check_invariants(pool)
os.write(ready, b"x")
assert reap(pid) == 0
for o in others: o.close()
stats = pool.stats()
assert (stats.pages_in_children, stats.pages_used, stats.pages_mapped) == (0, 0, 0), stats
testing.check_invariants(pool)
pool.close()
"""
    ).check()


def test_pages_are_lent_to_a_child_until_it_exits():
    run_snippet(
        PARENT
        + """
before = pool.stats()
assert before.pages_in_children == 0
wake, ready = os.pipe()
children = []
for i in range(3):
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        os.read(wake, 1)
        os._exit(0 if contents() else 1)
    children.append(pid)
assert pool.stats().pages_in_children > 0
t.fill_(5)  # unshares what the children see
assert pool.stats().pages_used > before.pages_used
testing.check_invariants(pool)
os.write(ready, b"xxx")
assert [reap(pid) for pid in children] == [0, 0, 0]
t.unshare(0, t.length); parent_of.unshare(0, 10); shared.unshare(0, 10)
stats = pool.stats()
assert stats.pages_in_children == 0 and stats.pages_used <= before.pages_used + 3, (before, stats)
go_on()
"""
    ).check()


def test_every_operation_in_the_child_is_a_clear_error():
    run_fork(
        """
def child():
    for name, operation in operations(t).items():
        try:
            operation()
        except vtensor.VTensorError as error:
            assert "fork" in str(error) and str(error).startswith("["), (name, error)
        else:
            raise AssertionError(name + " did not raise")
    for name, operation in operations(t).items():  # and again: nothing was half done
        try:
            operation()
        except vtensor.VTensorError:
            pass
        else:
            raise AssertionError(name)
    assert contents() and not t.closed and not pool.closed
"""
    )


def test_the_child_makes_no_driver_call():
    run_fork(
        """
def child():
    made = pool._core.driver_calls()
    for operation in operations(t).values():
        try:
            operation()
        except vtensor.VTensorError:
            pass
    assert pool._core.driver_calls() == made
    globals().update(t=None, view=None, array=None, parent_of=None, shared=None, orphan=None, default=None)
    gc.collect()
    assert pool._core.driver_calls() == made
"""
    )


@pytest.mark.parametrize(
    "leave, code",
    [
        ("os._exit(0)", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("raise SystemExit", 0),
        ("raise ValueError('as meant')", 1),
    ],
)
def test_the_child_leaves_normally(leave, code):
    """By finalizers too: deleters and exit handlers in the child touch nothing."""
    run_fork("def child():\n    assert contents()\n", leave=leave, code=code)


def test_the_child_falls_off_the_end():
    run_snippet(
        PARENT
        + """
pid = os.fork()
if pid:
    code = reap(pid)
    assert code == 0, code
    go_on()
else:
    assert contents()
    t.fill_(99)
    del view, array, orphan
"""
    ).check()


@pytest.mark.parametrize("order", ["t, view", "view, t", "pool, t, view, shared, parent_of, orphan, default"])
def test_objects_that_die_in_the_child(order):
    run_fork(
        f"""
def child():
    for name in {[name.strip() for name in order.split(",")]!r}:
        del globals()[name]
        gc.collect()
"""
    )


def test_a_child_of_a_child():
    run_fork(
        """
def child():
    t.fill_(1)
    pid = os.fork()
    if pid == 0:
        assert t.eq(1).all() and view.eq(1).all()
        t.fill_(2)
        os._exit(0)
    assert reap(pid) == 0 and t.eq(1).all()
"""
    )


def test_many_children_at_once():
    run_snippet(
        PARENT
        + """
children = []
for i in range(8):
    pid = os.fork()
    if pid == 0:
        ok = contents()
        t.fill_(i); parent_of.fill_(i)
        os._exit(0 if ok and t.eq(i).all() and parent_of.eq(i).all() and shared.eq(6).all() else 1)
    children.append(pid)
    t.extend(1).shrink(1)
assert [reap(pid) for pid in children] == [0] * 8
go_on()
"""
    ).check()


def test_fork_while_other_threads_work():
    """The pool's lock may be held by a thread that the child does not have: no deadlock there."""
    run_snippet(
        PARENT
        + """
import threading
stop = threading.Event()
def work(n):
    while not stop.is_set():
        x = quarter(pool, 3); x.fill_(n); x.extend(4); x.fork().fill_(1); x.shrink(3); x.close()
threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
for thread in threads: thread.start()
for i in range(20):
    pid = os.fork()
    if pid == 0:
        ok = bool(contents())
        t.fill_(9)
        try:
            t.extend(1); ok = False
        except vtensor.VTensorError:
            pass
        os._exit(0 if ok else 1)
    assert reap(pid) == 0
stop.set()
for thread in threads: thread.join(20)
go_on()
"""
    ).check()


def test_multiprocessing_fork():
    run_snippet(
        PARENT
        + """
def work(queue):
    assert contents()
    t.fill_(3)
    try:
        t.extend(1)
    except vtensor.VTensorError as error:
        queue.put(("fork" in str(error), t[0, 0, 0].item()))

context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
process = context.Process(target=work, args=(queue,))
process.start()
assert queue.get() == (True, 3)
process.join(30)
assert process.exitcode == 0
go_on()
"""
    ).check()


def test_a_pool_of_the_childs_own_after_exec():
    """A fresh interpreter started by the child has everything."""
    run_fork(
        """
def child():
    import subprocess
    code = ("import vtensor; t = vtensor.zeros(3, 4, grow_dim=0, capacity=9); "
            "assert not t.extend(2).any() and t.length == 5")
    subprocess.run([sys.executable, "-c", code], cwd=HERE, check=True, timeout=60)
"""
    )


def test_the_memfd_is_not_inherited_by_exec():
    run_snippet(
        """
        import fcntl
        pool = open_pool("host", 8)
        found = 0
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue
            if "memfd:" in target:
                found += 1
                assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert found == 1
        pool.close()
        """
    ).check()


@pytest.mark.skipif(simcuda_library() is None, reason="libsimcuda.so is not built")
def test_a_simulated_cuda_pool_refuses_in_the_child_too():
    run_snippet(
        """
        pool = open_pool("simcuda", 64)
        t = filled(pool, 5)
        pid = os.fork()
        if pid == 0:
            for operation in (lambda: t.extend(1), lambda: t.close(), lambda: quarter(pool, 1), pool.stats):
                try:
                    operation()
                except vtensor.VTensorError as error:
                    assert "fork" in str(error)
                else:
                    os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        t.extend(1); t.close(); pool.close()
        """
    ).check()
