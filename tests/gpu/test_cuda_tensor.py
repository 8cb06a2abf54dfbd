"""The life of a VTensor on the device, its contents compared with plain tensors."""

from __future__ import annotations

import random
import threading

import pytest
import torch

import vtensor
from devices import PAGE

HEADS, DIM = 8, 128
PER_PAGE = PAGE // (HEADS * DIM * 2)  # positions of a bf16 row in a 2 MiB page: 1,024


@pytest.fixture
def tokens(device):
    def make(n: int, rows: int = 2, seed: int = 0) -> torch.Tensor:
        on = device.torch_device
        generator = torch.Generator(on).manual_seed(seed)
        return torch.randn(rows, n, HEADS, DIM, dtype=torch.bfloat16, device=on, generator=generator)

    return make


def cache(pool, x: torch.Tensor, capacity: int = 32 * PER_PAGE) -> vtensor.VTensor:
    return vtensor.from_tensor(x, grow_dim=1, capacity=capacity, pool=pool)


def test_a_tensor_grows_and_shrinks_in_place(pool, tokens, device):  # I1, I2
    want = tokens(10)
    t = cache(pool, want)
    assert t.device == device.torch_device and t.data_ptr() == t.address
    address = t.address
    for step, n in enumerate((1, PER_PAGE, 3, 2 * PER_PAGE + 7)):
        x = tokens(n, seed=step + 1)
        t.append(x)
        want = torch.cat([want, x], 1)
        assert t.data_ptr() == address and torch.equal(t, want)
    t.truncate(PER_PAGE + 5)
    want = want[:, : PER_PAGE + 5]
    assert torch.equal(t, want)
    t.shrink(3, front=True)
    assert t.data_ptr() == address + 3 * HEADS * DIM * 2
    assert torch.equal(t, want[:, 3:])
    t.close()
    with pytest.raises(vtensor.Closed):
        t.sum()


def test_new_memory_and_reused_memory_show_zeros(pool):  # I7
    for _ in range(2):
        t = vtensor.empty(
            2, 3 * PER_PAGE, HEADS, DIM, grow_dim=1, capacity=8 * PER_PAGE, dtype=torch.bfloat16, pool=pool
        )
        assert not t.any()
        t.fill_(7)
        t.close()


def test_the_mapper_makes_pages_ready_that_show_zeros(device):  # I7, I15
    pool = device.pool(page_size=PAGE, budget=64 * PAGE, prefetch=16 * PAGE)
    for _ in range(2):  # fresh pages, and then those that the first tensor left
        t = vtensor.empty(0, grow_dim=0, capacity=32 * PAGE, dtype=torch.uint8, pool=pool)
        t.prepare(8 * PAGE)
        pool.wait_idle()
        before = pool.stats().driver_calls["caller"]
        t.extend(8 * PAGE)
        made = pool.stats().driver_calls
        assert made["caller"] == before and made["mapper"]["cuMemMap"] == 8
        assert not t.any()
        t.fill_(7)
        t.close()
        pool.wait_idle()
    pool.close()


def test_reallocate_moves_no_byte(pool, tokens):
    want = tokens(2 * PER_PAGE + 1)
    t = cache(pool, want)
    ids = [record.page_id for record in t.pages()]
    moved = t.reallocate(100 * PER_PAGE)
    assert [record.page_id for record in moved.pages()] == ids
    assert torch.equal(moved, want)
    moved.close()


@pytest.mark.parametrize("by_child", [True, False])
def test_writes_after_a_fork_stay_on_one_side(pool, tokens, by_child):  # I6
    want = tokens(2 * PER_PAGE + 9)
    parent = cache(pool, want)
    child = parent.fork()
    assert pool.stats().pages_used == 6  # of two rows: nothing was copied
    written, other = (child, parent) if by_child else (parent, child)
    x = tokens(5, seed=9)
    written.append(x)
    written.mul_(2)
    written.unshare(0, 4)[:, :4].zero_()
    expected = torch.cat([want, x], 1) * 2
    expected[:, :4] = 0
    assert torch.equal(written, expected)
    assert torch.equal(other, want)
    parent.close()
    child.close()


@pytest.mark.parametrize("device", ["gpu"], indirect=True)
def test_a_copied_page_holds_what_another_stream_was_about_to_write(pool, tokens):  # I2, I6
    parent = cache(pool, tokens(PER_PAGE // 2, rows=1))
    child = parent.fork()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    parent.unshare(0, parent.length)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        parent.fill_(3)
        grandchild = parent.fork().append(tokens(1, rows=1))
    torch.cuda.synchronize()
    assert bool((grandchild[:, :-1] == 3).all())
    assert torch.equal(child, tokens(PER_PAGE // 2, rows=1))
    for t in (parent, child, grandchild):
        t.close()


def test_reindex_remaps_rows(pool, tokens):
    want = tokens(PER_PAGE + 1, rows=3)
    t = cache(pool, want)
    used = pool.stats().pages_used
    t.reindex([2, 0, 2])
    assert torch.equal(t, want[[2, 0, 2]])
    pool.wait_idle()
    assert pool.stats().pages_used < used
    t.append(tokens(1, rows=3, seed=4))
    assert torch.equal(t[:, :-1], want[[2, 0, 2]])
    t.close()


def test_a_view_keeps_its_pages(pool, tokens):  # I3
    want = tokens(2 * PER_PAGE)
    t = cache(pool, want)
    view = t[:, PER_PAGE - 2 :]
    t.truncate(1)
    assert torch.equal(view, want[:, PER_PAGE - 2 :])
    t.close()
    assert torch.equal(view, want[:, PER_PAGE - 2 :])


def test_threads_without_a_context_of_their_own(pool, tokens):
    errors = []

    def work(seed: int) -> None:
        try:
            want = tokens(PER_PAGE + 3, rows=1, seed=seed)
            t = cache(pool, want)
            fork = t.fork().append(want[:, :1])
            assert torch.equal(fork[:, :-1], want)
            fork.close()
            t.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not errors


@pytest.mark.parametrize("queries", [1, 16])
def test_attention_over_a_vtensor_is_bit_for_bit_that_over_a_plain_tensor(pool, tokens, queries):
    k_plain, v_plain = tokens(PER_PAGE + 77, seed=1), tokens(PER_PAGE + 77, seed=2)
    q = tokens(queries, seed=3).transpose(1, 2)
    k, v = cache(pool, k_plain[:, :5]), cache(pool, v_plain[:, :5])
    k.append(k_plain[:, 5:])
    v.append(v_plain[:, 5:])
    # The rows of a VTensor stand capacity apart; a plain tensor of the same layout does so too.
    like = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in (k, v)]
    plain = [x.copy_(y) for x, y in zip(like, (k_plain, v_plain), strict=True)]
    attention = torch.nn.functional.scaled_dot_product_attention
    want = attention(q, *(x.transpose(1, 2) for x in plain))
    assert torch.equal(attention(q, k.transpose(1, 2), v.transpose(1, 2)), want)
    exact = attention(q.double(), k_plain.transpose(1, 2).double(), v_plain.transpose(1, 2).double())
    assert (want.double() - exact).abs().max() < 0.02
    k.close()
    v.close()


def test_forks_come_and_go_in_any_order(pool, tokens):  # I2, I6
    """Pages pass from owner to owner, are written to by the last one, and are shared again."""
    draw = random.Random(7)
    live = [(cache(pool, tokens(40, rows=3)), tokens(40, rows=3))]
    for step in range(150):
        at = draw.randrange(len(live))
        t, want = live[at]
        act = draw.choice(["fork", "fork", "append", "fill", "reindex", "reallocate", "close", "truncate"])
        if act == "fork" and len(live) < 6:
            live.append((t.fork(), want.clone()))
        elif act == "append":
            x = tokens(draw.choice([1, 30, PER_PAGE // 2]), rows=3, seed=step)
            if t.length + x.shape[1] <= t.capacity:
                live[at] = t.append(x), torch.cat([want, x], 1)
        elif act == "fill":
            live[at] = t.fill_(step), want.fill_(step)
        elif act == "reindex":
            rows = [draw.randrange(3) for _ in range(3)]
            live[at] = t.reindex(rows), want[rows]
        elif act == "reallocate":
            live[at] = t.reallocate(t.capacity), want
        elif act == "truncate":
            length = draw.randrange(t.length + 1)
            t.truncate(length)
            live[at] = t, want[:, :length].clone()
        elif act == "close" and len(live) > 1:
            live.pop(at)[0].close()
        for t, want in live:
            assert torch.equal(t, want), (step, act)
    for t, _ in live:
        t.close()
