"""An exception from outside before each bytecode of the operations of tensors, pools and leases (I17): what
is left is as before or as after, can be used and closed, and leaks nothing (I14)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import vtensor
from interrupts import at_every_bytecode, place
from support import filled, quarter, ramp, same_bytes
from vtensor import testing

LENGTH = 10


def tensors(pool):
    """One with shared pages among them: on CUDA its class is another."""

    with quarter(pool, LENGTH + 12, rows=(2,)) as like:
        content = ramp(like)

    def make():
        t = quarter(pool, LENGTH + 12, rows=(2,), capacity=32, when_full="move")
        t.copy_(content)
        t.shrink(12, front=True)
        f = t.fork()
        f[:, 2:3] = 7
        return SimpleNamespace(t=t, f=f, view=t[:, 1:4], content={"t": t.clone(), "f": f.clone()})

    return make


def grown(x, extra):
    return torch.cat([x, extra], 1)


def new(made):
    return torch.full_like(made.content["t"][:, :3], 9)


def many(made):
    return made.content["t"].flip(1)


# Of the state: what is run on `t`, and what `t` is after it (None: closed).
OPERATIONS = {
    "extend": (lambda m: m.t.extend(3), lambda m, x: x),
    "append": (lambda m: m.t.append(new(m)), lambda m, x: grown(x, new(m))),
    "extend past a page": (lambda m: m.t.extend(9), lambda m, x: x),
    "append and move": (
        lambda m: m.t.append(grown(new(m), many(m))),
        lambda m, x: grown(x, grown(new(m), many(m))),
    ),
    "prepare": (lambda m: m.t.prepare(3), lambda m, x: x),
    "shrink": (lambda m: m.t.shrink(3), lambda m, x: x[:, :-3]),
    "shrink in front": (lambda m: m.t.shrink(6, front=True), lambda m, x: x[:, 6:]),
    "truncate": (lambda m: m.t.truncate(1), lambda m, x: x[:, :1]),
    "reallocate": (lambda m: m.t.reallocate(50), None),
    "fork": (lambda m: m.t.fork(), lambda m, x: x),
    "unshare": (lambda m: m.t.unshare(0, LENGTH), lambda m, x: x),
    "reindex": (lambda m: m.t.reindex([1, 0]), lambda m, x: x[[1, 0]]),
    "reindex to more rows": (lambda m: m.t.reindex([1, 0, 1]), lambda m, x: x[[1, 0, 1]]),
    "alias": (lambda m: m.t.alias(), lambda m, x: x),
    "write": (lambda m: m.t.zero_(), lambda m, x: torch.zeros_like(x)),
    "close": (lambda m: m.t.close(), None),
    "with": (lambda m: m.t.__exit__(None, None, None), None),
    "empty_like": (lambda m: vtensor.empty_like(m.t), lambda m, x: x),
    "zeros": (lambda m: vtensor.zeros(3, 5, grow_dim=0, capacity=9, pool=m.t.pool), lambda m, x: x),
    "from_tensor": (lambda m: vtensor.from_tensor(m.t, 1, 40, pool=m.t.pool), lambda m, x: x),
    "lease": (lambda m: leased(m.t), lambda m, x: x),
}


def leased(t):
    with vtensor.lease(t):
        pass


def is_usable(t):
    """As every open tensor is; it grows, is written to and shrinks."""
    at = t.length
    t.extend(1)
    t[:, at:] = 3
    assert t.narrow(1, at, 1).eq(3).all() and t.untyped_storage().nbytes() > 0
    t.truncate(at)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_a_tensor(pool, name):
    operation, after = OPERATIONS[name]
    ended = set()

    def check(made, outcome):
        before = made.content["t"]
        t = made.t
        if t.closed:
            assert name in ("reallocate", "close", "with")
            ended.add("after")
            for use in (lambda: t + 1, lambda: t.shape, lambda: t.extend(1)):
                with pytest.raises(vtensor.Closed):
                    use()
        elif same_bytes(t[...], before):
            ended.add("before")
        else:
            expected = after(made, before)
            assert same_bytes(t[:, : expected.shape[1]], expected)
            assert t.length == expected.shape[1] or "extend" in name
            ended.add("after")
        assert same_bytes(made.f[...], made.content["f"])
        assert name == "write" or same_bytes(made.view, before[:, 1:4])
        for x in (t, made.f):
            if not x.closed:
                is_usable(x)
            x.close()
        del made.view
        if not outcome.interrupted:  # what it returned is held elsewhere
            return
        testing.check_invariants(pool)
        stats = pool.stats()
        assert (stats.tensors, stats.pages_used, stats.pages_pinned, stats.nbytes_reserved) == (0, 0, 0, 0)

    stride = 3 if name in ("empty_like", "zeros", "from_tensor") else 1  # many checks, which change nothing
    tried = at_every_bytecode(tensors(pool), operation, check, each=place, stride=stride)
    assert tried == 0 or "before" in ended


def test_a_pool_that_is_closed(pool_factory, kind):
    """It is open as before, less the tensors that were closed by then; or closed, with all of them."""

    def make():
        pool = pool_factory(kind, 64)
        return SimpleNamespace(pool=pool, tensors=[filled(pool, 6, i + 1) for i in range(3)])

    def check(made, outcome):
        open_ones = [t for t in made.tensors if not t.closed]
        if made.pool.closed:
            assert not open_ones
            with pytest.raises(vtensor.Closed):
                quarter(made.pool, 1)
        else:
            for i, t in enumerate(made.tensors):
                assert t.closed or t.extend(1)[:6].eq(i + 1).all()
            filled(made.pool, 3).close()
        made.pool.close()
        stats = made.pool.stats()
        assert made.pool.closed and (stats.tensors, stats.pages_used, stats.nbytes_reserved) == (0, 0, 0)

    assert at_every_bytecode(make, lambda made: made.pool.close(), check) > 0


@pytest.mark.parametrize("operation", ["trim", "budget", "stats", "wait_idle"])
def test_an_operation_on_a_pool(pool_factory, kind, operation):
    pool = pool_factory(kind, 64)
    page = pool.page_size
    run = {
        "trim": lambda p: p.trim(),
        "budget": lambda p: setattr(p, "budget", 40 * page),
        "stats": lambda p: p.stats(),
        "wait_idle": lambda p: p.wait_idle(),
    }[operation]

    def make():
        pool.budget = 64 * page
        pool.trim()
        return pool

    def check(pool, outcome):
        assert pool.budget in (64 * page, 40 * page) and pool.stats().pages_spare == 0
        filled(pool, 6).close()
        testing.check_invariants(pool)

    assert at_every_bytecode(make, run, check) > 0
    pool.close()
