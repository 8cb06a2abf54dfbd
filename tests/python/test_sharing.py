"""Pages shared by fork, deepcopy and reindex: a write is never seen by the other side (I6)."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

import vtensor
from cuda_support import needs_simcuda
from support import (
    PER_PAGE,
    calls,
    calls_since,
    check_sums,
    filled,
    page_ids,
    quarter,
    ramp,
    run_snippet,
    same_bytes,
)
from vtensor import testing

LENGTH = 10  # two whole pages and a half


def base(pool, **kw):
    t = quarter(pool, LENGTH, dtype=torch.float32, **kw)
    return t.copy_(ramp(t))


# Each changes x in place, by the ways torch and numpy have.
WRITES = {
    "fill_": lambda x: x.fill_(3.0),
    "setitem": lambda x: x.__setitem__(0, 1.0),
    "setitem_mask": lambda x: x.__setitem__(x > 0, 5.0),
    "iadd": lambda x: x.__iadd__(1),
    "add_": lambda x: x.add_(1.0),
    "copy_": lambda x: x.copy_(torch.zeros_like(x)),
    "zero_": lambda x: x.zero_(),
    "random": lambda x: x.uniform_(1, 2),
    "out": lambda x: torch.add(torch.ones(x.shape), 1.0, out=x),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([2]), torch.ones(1, x.shape[1])),
    "index_put_": lambda x: x.index_put_((torch.tensor([1]),), torch.tensor(9.0)),
    "masked_fill_": lambda x: x.masked_fill_(x != 0, 8.0),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(1, 3, dtype=torch.int64), 7.0),
    "where_out": lambda x: torch.where(x > 0, torch.full(x.shape, 6.0), x, out=x),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "relu_inplace": lambda x: torch.nn.functional.relu(x.neg_(), inplace=True),
    "threshold_inplace": lambda x: torch.nn.functional.threshold(x, 1e9, 3.0, inplace=True),
    "by_keyword": lambda x: torch.nn.init.ones_(tensor=x),
    "max_out": lambda x: torch.max(
        torch.ones(2, *x.shape), 0, out=(x, torch.empty(x.shape, dtype=torch.int64))
    ),
    "running_mean": lambda x: torch.nn.functional.batch_norm(
        torch.ones(3, x.numel()), x.view(-1), torch.ones(x.numel()), training=True
    ),
}
ALIASED = {
    "numpy": lambda x: x.numpy().__setitem__(-1, 2.0),
    "dlpack": lambda x: torch.from_dlpack(x).__setitem__(1, 4.0),
}


def write_on_one_side(pool, write, by_child):
    parent = base(pool)
    child = parent.fork()
    writer, other = (child, parent) if by_child else (parent, child)
    expected = ramp(other)
    WRITES[write](writer)
    assert not same_bytes(writer, expected), f"{write} did nothing"
    assert same_bytes(other, expected), write  # I6
    plain = expected.clone()
    if write != "random":
        WRITES[write](plain)
        assert same_bytes(writer, plain), write


def test_a_write_to_a_host_tensor_stays_on_its_side(host):
    for write in WRITES:
        for by_child in (True, False):
            write_on_one_side(host, write, by_child)


@needs_simcuda
def test_a_write_to_a_cuda_tensor_stays_on_its_side():
    """In a process of its own: a write that reached a read-only page would end it."""
    run_snippet(
        """
        from test_sharing import WRITES, write_on_one_side
        pool = open_pool("simcuda", 64)
        for write in WRITES:
            if write == "running_mean":
                continue  # writes through a view: unshare() comes first there
            for by_child in (True, False):
                print(write, by_child, flush=True)
                write_on_one_side(pool, write, by_child)
        mean, plain = vtensor.from_tensor(torch.zeros(2048), 0, 2048, pool=pool), torch.zeros(2048)
        child = mean.fork()
        for running in (mean, plain):  # torch does not say that batch norm writes it
            torch.nn.functional.batch_norm(torch.ones(3, 2048), running, torch.ones(2048), training=True)
        assert torch.equal(mean, plain) and not child.any()
        pool.close()
        """
    ).check()


@needs_simcuda
def test_a_sparse_tensor_is_changed_in_place_by_a_shared_one(simcuda):
    t = base(simcuda)
    child = t.fork()
    sparse = torch.ones(t.shape).to_sparse()
    assert same_bytes(sparse.mul_(t).to_dense(), ramp(t)) and same_bytes(child, ramp(t))


def move_beside_a_view(t):
    view = t[:1]
    return t.reallocate(2 * t.capacity), view


# Each leaves shared pages in the tensor that it returns first.
SHARES = {
    "fork": lambda t: (t, t.fork()),
    "fork of it": lambda t: (t.fork(), t),
    "reallocate": move_beside_a_view,
    "reindex": lambda t: (t.reindex([0, 0]), None),
}


@needs_simcuda
@pytest.mark.parametrize("share", SHARES)
def test_a_class_that_is_refused_leaves_no_shared_page_without_its_hook(share):  # I6, I8
    """In a process of its own: audit hooks stay, and a write that reached a read-only page would end it."""
    run_snippet(
        f"""
        from test_sharing import SHARES, base
        refused_at = None
        def refuse(event, arguments):
            global refused_at
            if event != "object.__setattr__" or arguments[1] != "__class__" or refused_at is None:
                return
            refused_at -= 1
            if refused_at == -1:
                raise ZeroDivisionError
        sys.addaudithook(refuse)
        unraisable = []
        sys.unraisablehook = unraisable.append
        pool = open_pool("simcuda", 64)
        outcomes = []
        for n in range(100):
            t = base(pool, rows=(2,))
            pages, expected = [page.page_id for page in t.pages()], t.clone()
            unraisable.clear()
            refused_at, kept = n, None
            try:
                t, kept = SHARES[{share!r}](t)
                refused = False
            except ZeroDivisionError:
                refused = True
            left, refused_at = refused_at, None
            if refused:  # nothing has changed
                assert [page.page_id for page in t.pages()] == pages and t.eq(expected).all()
            elif unraisable and t.numel() == 0:  # its memory comes back with the next operation
                try:
                    t.extend(0)
                except vtensor.VTensorError:
                    pass
            if {share!r} != "reindex":
                assert t.eq(expected).all()
            t.zero_()  # would fault
            assert t.eq(0).all()
            t.close()
            del t, kept
            if left >= 0:
                break
            outcomes.append(refused)
        print(outcomes)
        assert True in outcomes
        pool.close()
        """
    ).check()


@pytest.mark.exact
def test_without_pagemap_a_fork_counts_as_a_copy():
    """Where nothing says what writes have copied, each tensor counts its pages, and none twice."""
    run_snippet(
        """
        pool = open_pool("host", 64)
        [file] = [f for f in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{f}")
                  and os.readlink(f"/proc/self/fd/{f}").endswith("/pagemap")]
        os.dup2(os.open("/dev/null", os.O_RDWR), int(file))
        t = filled(pool, 20 * PER_PAGE, capacity=30 * PER_PAGE)
        forks = []
        for n in (2, 3):
            forks.append(t.fork())
            assert pool.stats().pages_used == n * 20
            t.extend(4 * PER_PAGE)
            assert pool.stats().pages_used == n * 20 + 4
            t.truncate(20 * PER_PAGE)
        assert all(same_bytes(t, fork) for fork in forks)
        t.fill_(2)
        forks[0].fill_(3)
        assert forks[1].eq(1).all()
        assert pool.stats().pages_used == 60 and pool.stats().pages_free == 4
        del forks
        assert pool.stats().pages_used == 20
        testing.check_invariants(pool)
        pool.close()
        """
    ).check()


@pytest.mark.exact
@pytest.mark.parametrize("write", ["fill_", *ALIASED])
@pytest.mark.parametrize("view_of", ["parent_before_the_fork", "parent", "child"])
def test_a_write_through_a_host_view_stays_on_its_side(host, write, view_of):
    parent = base(host)
    view = parent[:]
    child = parent.fork()
    if view_of != "parent_before_the_fork":
        view = child[:] if view_of == "child" else parent[:]
    writer, other = (child, parent) if view_of == "child" else (parent, child)
    expected = ramp(other)
    (WRITES | ALIASED)[write](view)
    assert same_bytes(view, writer) and not same_bytes(writer, expected)
    assert same_bytes(other, expected)  # I6
    # Private copies are folded by now, and by the next fork; nothing may change by it.
    written = writer.clone()
    assert host.stats().pages_used > 3
    grandchild = writer.fork()
    assert same_bytes(grandchild, written) and same_bytes(writer, written) and same_bytes(other, expected)
    view.fill_(11.0)
    assert same_bytes(grandchild, written) and writer.eq(11).all() and same_bytes(other, expected)


# --- counts -----------------------------------------------------------------------------------------------


@pytest.mark.exact
def test_a_fork_costs_no_page_until_a_write_and_then_one(host):
    pool = host
    parent = filled(pool, 4 * PER_PAGE, rows=(2,))
    assert pool.stats().pages_used == 8
    child = parent.fork()
    stats = pool.stats()
    assert (stats.pages_used, stats.pages_mapped) == (8, 16)
    assert child.sum() == parent.sum() and str(child) and pool.stats().pages_used == 8
    child[1, 5] = 9
    assert pool.stats().pages_used == 9
    child[1, 6] = 9  # the same page
    assert pool.stats().pages_used == 9
    parent[1, 7] = 8  # the other side of that page: what both shared goes once it is folded
    assert pool.stats().pages_used == 10
    parent.fork().close()
    child.fork().close()
    assert pool.stats().pages_used == 9
    assert [r.shared for r in child.pages()] == [2, 2, 2, 2, 2, 1, 2, 2]
    child.close()
    assert pool.stats().pages_used == 8
    assert parent[0].eq(1).all() and parent[1, 7].eq(8).all() and parent[1, :7].eq(1).all()


@pytest.mark.exact
def test_an_in_place_operation_on_a_cuda_tensor_costs_its_shared_pages(simcuda):
    """No fault copies a page there: the tensor's own are unshared before the write."""
    parent = filled(simcuda, 4 * PER_PAGE, rows=(2,))
    child = parent.fork()
    assert child.sum() == parent.sum() and str(child) and simcuda.stats().pages_used == 8
    assert child.unshare(3, 6) is child
    assert simcuda.stats().pages_used == 8 + 2 * 2
    child[1, 5] = 9
    assert simcuda.stats().pages_used == 16
    parent.fill_(3)
    assert simcuda.stats().pages_used == 16 and {r.shared for r in parent.pages()} == {1}
    assert child[1, 5].eq(9).all() and child[0].eq(1).all()


@pytest.mark.exact
@pytest.mark.parametrize("first", ["parent", "child"])
def test_the_last_partial_page_is_copied_by_whoever_appends_first(pool, first):
    parent = base(pool)
    child = parent.fork()
    a, b = (parent, child) if first == "parent" else (child, parent)
    assert pool.stats().pages_used == 3
    x = torch.full((1, a.shape[1]), 3.0)
    a.append(x)
    assert pool.stats().pages_used == 4
    b.append(x + 1)
    assert pool.stats().pages_used == 4
    assert same_bytes(a, torch.cat([ramp(a[:LENGTH]), x]))  # I6
    assert same_bytes(b, torch.cat([ramp(b[:LENGTH]), x + 1]))


@pytest.mark.exact
def test_an_append_at_a_page_boundary_copies_nothing(pool):
    parent = filled(pool, 2 * PER_PAGE)
    child = parent.fork()
    before = calls(pool)
    child.extend(1)
    made = calls_since(pool, before)
    assert not made.get("pwrite") and not made.get("cuMemcpyDtoDAsync")
    assert pool.stats().pages_used == 3 and parent.length == 2 * PER_PAGE


@pytest.mark.exact
def test_parted_pages_are_charged_and_then_folded(host):
    parent = base(host)
    child = parent.fork()
    ids = page_ids(parent)
    view = parent[:]
    view[0] = 1.0  # the kernel copies the page
    view[9] = 1.0
    before = calls(host)
    stats = host.stats()
    assert (stats.pages_used, stats.pages_private) == (5, 2)
    assert [(r.state, r.shared) for r in parent.pages()] == [("private", 1), ("shared", 2), ("private", 1)]
    assert page_ids(child) == ids
    assert not calls_since(host, before).get("pwrite"), "a count copies nothing: writers know nothing of it"
    grandchild = parent.fork()
    stats = host.stats()
    assert (stats.pages_used, stats.pages_private) == (5, 0)
    assert [mine == old for mine, old in zip(page_ids(parent), ids, strict=True)] == [False, True, False]
    assert page_ids(grandchild) == page_ids(parent)
    assert [r.shared for r in child.pages()] == [1, 3, 1]
    before = calls(host)
    parent.fork()
    assert not calls_since(host, before).get("pwrite"), "folded twice"


@pytest.mark.exact
@pytest.mark.parametrize("refuse", [1, 1000], ids=["once", "undoing_too"])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("operation", ["fork", "unshare"])
def test_a_refused_remap_keeps_what_the_kernel_copied(pool_factory, operation, row, refuse):
    """I8: the bytes of such a page lie nowhere else once it is folded, so its old page is not put back. Other
    pages are put back or stay, since either shows the same bytes."""
    for n in range(100):
        pool = pool_factory("host")
        parent = quarter(pool, LENGTH, rows=(2,), dtype=torch.float32)
        parent.copy_(ramp(parent))
        child = parent.fork()
        expected = ramp(parent)
        for x in (parent[row, 0], expected[row, 0]):
            x.fill_(42.0)
        with testing.fail_after(pool, n, refuse) as refused, contextlib.suppress(vtensor.DriverError):
            parent.fork() if operation == "fork" else parent.unshare(0, LENGTH)
        assert pool.broken is None
        assert same_bytes(parent, expected)
        for x in (parent[:, 1], expected[:, 1]):
            x.fill_(7.0)
        assert same_bytes(parent.fork(), expected) and same_bytes(parent, expected)
        assert same_bytes(child, ramp(child))  # I6
        if not refused:
            return
    raise AssertionError("more than 100 driver calls")


@pytest.mark.exact
def test_what_a_refused_unsharing_copied_is_not_shown_to_the_pages_last_owner(pool_factory):
    """I7: the last reference keeps its page and copies into it, and so it is no page of its last owner's."""
    for n in range(100):
        pool = pool_factory("host", pages=8)
        parent = filled(pool, 3 * PER_PAGE, 1)
        child = parent.fork()
        child[:].fill_(42)
        parent.truncate(0)
        with testing.fail_after(pool, n) as refused, contextlib.suppress(vtensor.DriverError):
            child.unshare(0, 3 * PER_PAGE)
        child.close()
        parent.extend(8 * PER_PAGE)
        assert parent.ne(42).all()
        if not refused:
            return
    raise AssertionError("more than 100 driver calls")


@pytest.mark.exact
def test_folding_that_does_not_fit_raises_and_loses_nothing(pool_factory):
    pool = pool_factory("host", pages=8)
    parent = filled(pool, 5 * PER_PAGE, 1)
    child = parent.fork()
    child[:].fill_(2)  # two pages more than the pool has left: the kernel copies unasked
    stats = check_sums(pool)  # I5
    assert (stats.pages_used, stats.pages_free, stats.pages_over, stats.pages_private) == (8, 0, 2, 5)
    assert stats.nbytes_held == 10 * stats.page_size
    with pytest.raises(vtensor.OutOfPages) as caught:
        child.fork()
    assert isinstance(caught.value, MemoryError)  # I9
    assert parent.eq(1).all() and child.eq(2).all() and not child.closed  # I8
    testing.check_invariants(pool)
    parent.close()
    grandchild = child.fork()
    assert child.eq(2).all() and grandchild.eq(2).all()
    stats = pool.stats()
    assert stats.pages_used == 5 and stats.pages_used + stats.pages_free == 8  # I5


@pytest.mark.exact
@pytest.mark.parametrize("operation", ["append", "unshare"])
def test_a_page_that_replaces_what_the_kernel_copied_fits_a_full_budget(pool_factory, operation):
    pool = pool_factory("host", pages=2)
    parent = filled(pool, PER_PAGE - 1, 1)
    child = parent.fork()
    child[0] = 2
    stats = pool.stats()
    assert (stats.pages_used, stats.pages_free, stats.pages_private) == (2, 0, 1)
    child.append(child[:1].clone()) if operation == "append" else child.unshare(0, 1)
    assert pool.stats().pages_private == 0
    assert child[0].eq(2).all() and child[1:3].eq(1).all() and child[3:].eq(2).all() and parent.eq(1).all()


# --- deepcopy and reindex ---------------------------------------------------------------------------------


def test_deepcopy_is_a_fork(pool):
    t = base(pool, rows=(2,), capacity=33)
    twin, same = copy.deepcopy([t, t])
    assert twin is same and isinstance(twin, vtensor.VTensor) and page_ids(twin) == page_ids(t)
    assert (twin.capacity, twin.grow_dim, twin.pool) == (33, 1, pool)
    twin.zero_()
    assert same_bytes(t, ramp(t))


@pytest.mark.exact
@pytest.mark.parametrize("first", [0, 1, 2])  # 1: the row that stays
def test_reindexed_rows_part_at_the_first_write(pool, first):
    t = filled(pool, 2 * PER_PAGE, rows=(3,), capacity=64)
    t.reindex([1, 1, 1])
    assert pool.stats().pages_used == 2 and {r.shared for r in t.pages()} == {3}
    second, third = (first + 1) % 3, (first + 2) % 3
    t[first] = 5
    assert t[first].eq(5).all() and t[second].eq(1).all() and t[third].eq(1).all()  # I6
    t[third, -1] = 6
    assert t[second].eq(1).all() and t[third, -1].eq(6).all() and t[first].eq(5).all()
