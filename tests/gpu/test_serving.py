"""A KVCache and an Arena on the device: requests against the model of their contents."""

from __future__ import annotations

import pytest
import torch

import vtensor
from devices import PAGE
from vtensor.testing.kv_model import Request, check_contents, own_values, write

LAYERS, HEADS, DIM = 2, 2, 64
UNIT = PAGE // (HEADS * DIM * 4)  # tokens to a page of a row in float32: 4,096
ROWS = 2 * LAYERS  # K and V of each layer
PROMPT = list(range(2 * UNIT + 5))


@pytest.fixture(params=[0, 8], ids=["no mapper", "mapper"])
def cache(request, device):
    pool = device.pool(request.param * PAGE, page_size=PAGE, budget=128 * PAGE)
    sizes = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": DIM, "max_batch": 6}
    with vtensor.KVCache(
        **sizes, max_len=6 * UNIT, dtype=torch.float32, pool=pool, lookahead=4 if request.param else 0
    ) as cache:
        yield cache
    pool.wait_idle()
    pool.trim()
    assert pool.stats().pages_used == 0  # I14
    pool.close()


def grow(cache: vtensor.KVCache, lengths: dict[int, int]) -> None:
    wanted = cache.lengths
    for slot, length in lengths.items():
        wanted[slot] = length
    assert cache.step(wanted)


def begun(cache: vtensor.KVCache, values: list[int], **options) -> int:
    """A slot with tokens of these values."""
    slot = cache.alloc(**options)
    known = cache.length(slot)
    grow(cache, {slot: len(values)})
    write(cache, slot, known, values[known:])
    return slot


def test_requests_grow_and_what_is_reused_shows_no_others(cache):  # I2, I7
    values = own_values()
    requests = {cache.alloc(): Request() for _ in range(3)}
    for count in (7, UNIT - 6, 1, UNIT, 3):
        grow(cache, {slot: len(request.values) + count for slot, request in requests.items()})
        for slot, request in requests.items():
            start = len(request.values)
            request.append(request.extended(count, values))
            write(cache, slot, start, request.values[start:])
        for slot, request in requests.items():
            check_contents(cache, slot, request.values)
    for slot in requests:
        cache.free(slot)
    cache.pool.wait_idle()
    fresh = cache.alloc(expect=2 * UNIT)
    grow(cache, {fresh: 2 * UNIT})
    mine = {value for request in requests.values() for value in request.values}
    k, _ = cache[0]
    assert not set((k[fresh, : 2 * UNIT, 0, 0] / 16).long().unique().tolist()) - mine - {0}  # its slot's own


def test_a_prefix_is_computed_once_and_forks_part_at_a_write(cache):  # I6
    values = [i % 1000 for i in PROMPT]
    first = begun(cache, values)
    assert cache.publish(first, PROMPT) == 2 * UNIT
    second = begun(cache, values, tokens=PROMPT)
    cache.pool.wait_idle()
    check_contents(cache, second, values)
    assert len({record.page_id for record in cache.pages(first)} & {r.page_id for r in cache.pages(second)})
    (fork,) = cache.fork(second)
    grow(cache, {slot: len(values) + 1 for slot in (first, second, fork)})
    for number, slot in enumerate((first, second, fork)):
        write(cache, slot, len(values), [number + 1])
    cache.write(0, fork, 3, *(torch.full((1, HEADS, DIM), 5.0, device=t.device) for t in cache[0]))
    for number, slot in enumerate((first, second)):
        check_contents(cache, slot, [*values, number + 1])
    check_contents(cache, fork, [*values, 3], layers=[1])
    assert bool((cache[0][0][fork, 3] == 5).all()) and bool((cache[0][1][fork, 3] == 5).all())


def test_requests_that_share_are_swapped_and_come_back(cache):  # I2, I6
    values = [i % 1000 for i in range(3 * UNIT - 4)]
    slot = begun(cache, values)
    (fork,) = cache.fork(slot)
    before = cache.stats().pages_active
    cache.swap_out([slot, fork])
    cache.pool.wait_idle()
    assert cache.stats().pages_active == 0 and cache.lengths == [0] * 6
    other = begun(cache, [1] * UNIT)
    assert cache.swap_in([slot, fork])
    for layer in range(LAYERS):
        cache.wait(slot, layer)
        check_contents(cache, slot, values, layers=[layer])
    cache.wait(fork)
    check_contents(cache, fork, values)
    check_contents(cache, other, [1] * UNIT)
    assert cache.stats().pages_active == before + 2 * ROWS  # those of `other`, with a tile behind it


def test_a_reorder_of_beams_copies_nothing(cache):
    values = [i % 1000 for i in range(UNIT + 9)]
    beams = [begun(cache, values)]
    beams += cache.fork(beams[0], 2)
    for step, sources in enumerate(([0, 0, 1], [2, 2, 2])):
        length = cache.length(beams[0]) + 1
        grow(cache, dict.fromkeys(beams, length))
        for number, slot in enumerate(beams):
            write(cache, slot, length - 1, [10 * step + number])
        beams = cache.reorder(beams, [beams[source] for source in sources])
    for slot in beams:
        check_contents(cache, slot, [*values, 1, 12])


def test_memory_sleeps_and_wakes_with_its_contents(device, tmp_path):  # I17
    pool = device.pool(page_size=PAGE, budget=128 * PAGE)
    for contents in ("host", str(tmp_path)):
        t = vtensor.empty(3 * PAGE, grow_dim=0, capacity=8 * PAGE, dtype=torch.uint8, pool=pool)
        fork = t.random_(0, 255).fork()
        fork[5] = 1
        expected = [x.clone() for x in (t, fork)]
        before = device.free_memory()
        assert pool.sleep(contents=contents) >= 4 * PAGE
        assert device.free_memory() >= before + 4 * PAGE
        assert pool.stats().pages_mapped == 0
        pool.wake()
        assert torch.equal(t, expected[0]) and torch.equal(fork, expected[1])
        del expected
        t.close(), fork.close()
    pool.close()


@pytest.mark.parametrize("zeros", [False, True])
def test_blocks_of_an_arena_share_pages(device, zeros):  # I7
    block = PAGE * 3 // 2
    pool = device.pool(page_size=PAGE, budget=16 * PAGE, cache=16 * PAGE)
    with vtensor.Arena(16 * block, pool=pool, zeros=zeros) as arena:
        spans = [(i * block, (i + 1) * block) for i in range(16)]
        if zeros:
            assert not arena.tensor.any()  # no page is mapped but that of zeros
        arena.map(spans[:6])
        for i in range(6):
            arena.tensor[slice(*spans[i])].fill_(i + 1)
        arena.unmap(spans[1:5])
        assert arena.map(spans[2:3]) == [True]
        for i in (0, 2, 5):
            assert bool((arena.tensor[slice(*spans[i])] == i + 1).all())
        assert arena.trim() > 0
        pool.wait_idle()
        others = vtensor.empty(7 * PAGE, grow_dim=0, capacity=8 * PAGE, dtype=torch.uint8, pool=pool)
        others.fill_(99).close()
        arena.map(spans[8:14])
        assert not (arena.tensor[spans[8][0] : spans[13][1]] == 99).any()
    pool.close()
