"""Every public method and function of tensors, inside a compiled function: it works, or breaks the graph and
works. Sizes come as torch.compile holds them: symbolic, of a shape."""

from __future__ import annotations

import copy

import pytest
import torch

import vtensor
from support import quarter, ramp
from vtensor import VTensor

METHODS = {
    "extend": lambda t, n: t.extend(n),
    "prepare": lambda t, n: t.prepare(n),
    "append": lambda t, n: t.append(torch.full((n, t.shape[1]), 5, dtype=t.dtype)),
    "shrink": lambda t, n: t.shrink(n),
    "truncate": lambda t, n: t.truncate(n),
    "reallocate": lambda t, n: t.reallocate(50 + n),
    "fork": lambda t, n: t.fork(),
    "unshare": lambda t, n: t.unshare(0, n),
    "alias": lambda t, n: t.alias(),
    "pages": lambda t, n: len(t.pages()),
    "numpy": lambda t, n: torch.from_numpy(t.numpy()),
    "record_stream": lambda t, n: t.record_stream(1 << 20),
    "requires_grad_": lambda t, n: t.requires_grad_(False),
    "close": lambda t, n: t.close(),
    "length": lambda t, n: t.length,
    "capacity": lambda t, n: t.capacity,
    "grow_dim": lambda t, n: t.grow_dim,
    "when_full": lambda t, n: t.when_full,
    "pool": lambda t, n: t.pool.page_size,
    "nbytes_mapped": lambda t, n: t.nbytes_mapped,
    "nbytes_reserved": lambda t, n: t.nbytes_reserved,
    "closed": lambda t, n: t.closed,
    "data": lambda t, n: t.data,
    "requires_grad": lambda t, n: t.requires_grad,
}
OTHERS = {
    "shrink in front": lambda t, n: t.shrink(n, front=True),
    "copy": lambda t, n: copy.copy(t),
    "deepcopy": lambda t, n: copy.deepcopy(t),
    "dlpack": lambda t, n: torch.from_dlpack(t),
    "empty_like": lambda t, n: vtensor.empty_like(t).length,
    "from_tensor": lambda t, n: vtensor.from_tensor(t[:n], 0, 50, pool=t.pool),
    "zeros": lambda t, n: vtensor.zeros(n, 3, grow_dim=0, capacity=50, pool=t.pool),
    "lease": lambda t, n: leased(t),
}
# reindex needs rows, and address differs from tensor to tensor: below. These are always refused.
REFUSED = {
    *"resize_ resize_as_ set_ share_memory_ as_strided_ squeeze_".split(),
    *"swapaxes_ swapdims_ t_ transpose_ unsqueeze_".split(),
}


def leased(t):
    with vtensor.lease(t):
        return t + 1


def test_all_are_here():
    public = {name for name in vars(VTensor) if not name.startswith("_")}
    assert public == set(METHODS) | REFUSED | {"reindex", "address"}


def told(result):
    """What can be compared of it."""
    if isinstance(result, VTensor):
        return type(result), result.closed or (result.length, result.capacity, result.clone().tolist())
    return result.tolist() if isinstance(result, torch.Tensor) else result


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", dynamic=True)


@pytest.mark.parametrize("name", [*METHODS, *OTHERS])
def test_a_method(host, name):
    call = (METHODS | OTHERS)[name]

    def step(t, x):
        y = x * 2
        result = call(t, x.shape[0])
        return y + 1, result

    x = torch.ones(3)
    plain, same = (quarter(host, 12) for _ in range(2))
    plain.copy_(ramp(plain))
    same.copy_(plain)
    expected, found = step(plain, x), compiled(step)(same, x)
    assert torch.equal(found[0], expected[0]) and told(found[1]) == told(expected[1])
    assert told(same) == told(plain)


def test_reindex_and_address(host):
    def step(t, x):
        y = x * 2
        t.reindex([1, 0])
        return y + 1, t.address

    t = quarter(host, 12, rows=(2,))
    t[1].fill_(1)
    found, address = compiled(step)(t, torch.ones(3))
    assert found.eq(3).all() and address == t.address and t[0].eq(1).all() and not t[1].any()


def test_growing_and_shrinking_in_one_function(host):
    """Over many tensors and sizes: nothing of one is kept for the next."""

    def step(t, x):
        n = x.shape[0]
        t.extend(n)
        t[-n:] = 2
        t.shrink(n, front=True)
        seen = t.alias()
        t.truncate(t.length - 1)
        return (seen * 2).sum() + x.sum(), len(t.pages()), t.length

    fast = compiled(step)
    for n in (1, 2, 3, 5, 8, 13, 2, 1, 8, 4, 6, 7):
        plain, same = (quarter(host, 16) for _ in range(2))
        expected, found = step(plain, torch.ones(n)), fast(same, torch.ones(n))
        assert found[0] == expected[0] and found[1:] == expected[1:] and told(same) == told(plain)


@pytest.mark.parametrize("operation", ["shrink", "truncate", "prepare", "extend"])
def test_what_is_refused_is_refused_in_our_words(host, operation):
    def step(t, x):
        y = x * 2
        getattr(t, operation)(x.shape[0])
        return y

    t = quarter(host, 12)
    with pytest.raises(vtensor.VTensorError, match=rf"^\[VTensor\.{operation}\]"):
        compiled(step)(t, torch.ones(100))
    assert t.extend(1).length == 13


CACHE_OPERATIONS = {
    "step": lambda c, n: c.step([n, 0]),
    "length": lambda c, n: c.length(0),
    "truncate": lambda c, n: c.truncate(0, n - 1),
    "publish": lambda c, n: c.publish(0, list(range(n - 1))),
    "unshare": lambda c, n: c.unshare(0, 0, n - 1),
    "fork": lambda c, n: c.fork(0, 1),
    "reorder": lambda c, n: c.reorder([0, 1], [1, 0]),
    "swap_out": lambda c, n: c.swap_out(1),
    "swap_in": lambda c, n: c.swap_in(1),
    "wait": lambda c, n: c.wait(1, 0),
    "free": lambda c, n: c.free(1),
    "alloc": lambda c, n: c.alloc([1, 2, 3]),
    "stats": lambda c, n: c.stats().tokens,
    "record_stream": lambda c, n: c.record_stream(),
}


def test_a_cache_in_a_compiled_function(host):
    """A request's life, each call in a function of its own: it breaks the graph, and works."""
    x = torch.ones(9)
    with vtensor.KVCache(2, 2, 32, 2, 64, dtype=torch.float32, pool=host) as cache:
        assert cache.alloc() == 0
        for name, operation in CACHE_OPERATIONS.items():

            def call(x, operation=operation):
                y = x * 2
                operation(cache, x.shape[0])
                return y + 1

            assert compiled(call)(x).eq(3).all(), name
        assert cache.lengths == [8, 0] and cache.stats().slots_used == 2
