"""What a KVCache refuses: the class, the words, and nothing changed."""

from __future__ import annotations

import re

import pytest
import torch

import vtensor
from kv_support import MAX_BATCH, UNIT, make_cache
from vtensor.testing.kv_model import check_contents, write

BAD = {
    "unknown slot": (lambda c: c.free(99), vtensor.InvalidArgument, "slot 99.*slots 0 to 5"),
    "negative slot": (lambda c: c.length(-1), vtensor.InvalidArgument, "slot -1.*slots 0 to 5"),
    "no slot": (lambda c: c.fork("a"), vtensor.InvalidArgument, "slot is 'a'"),
    "free slot": (lambda c: c.free(3), vtensor.InvalidArgument, "slot 3 is free"),
    "shrink": (
        lambda c: c.step([9, 0, 0, 0, 0, 0]),
        vtensor.InvalidArgument,
        "10 tokens.*to have 9.*truncate",
    ),
    "too long": (
        lambda c: c.step([999, UNIT, 0, 0, 0, 0]),
        vtensor.CapacityExceeded,
        "999 tokens, max_len is 120",
    ),
    "length of a free slot": (
        lambda c: c.step([10, UNIT, 0, 1, 0, 0]),
        vtensor.InvalidArgument,
        "slot 3 is free",
    ),
    "too few lengths": (lambda c: c.step([10]), vtensor.InvalidArgument, "1 lengths.*6 slots"),
    "too many lengths": (
        lambda c: c.step([10, UNIT] + [0] * 9),
        vtensor.InvalidArgument,
        "11 lengths.*6 slots",
    ),
    "negative length": (lambda c: c.step([-1, UNIT, 0, 0, 0, 0]), vtensor.InvalidArgument, "to have -1"),
    "a prepared length that shrinks": (
        lambda c: c.prepare([9, UNIT, 0, 0, 0, 0]),
        vtensor.InvalidArgument,
        "10 tokens.*to have 9",
    ),
    "swapped length": (
        lambda c: c.step([10, UNIT, 4, 0, 0, 0]),
        vtensor.InvalidArgument,
        "slot 2 is swapped out",
    ),
    "fork of a swapped slot": (lambda c: c.fork(2), vtensor.InvalidArgument, "slot 2 is swapped out"),
    "swap out twice": (lambda c: c.swap_out(2), vtensor.InvalidArgument, "slot 2 is swapped out already"),
    "swap out of a free slot": (lambda c: c.swap_out(3), vtensor.InvalidArgument, "slot 3 is free"),
    "swap out named twice": (lambda c: c.swap_out([0, 0]), vtensor.InvalidArgument, "slot 0 is named twice"),
    "swap in of what is here": (lambda c: c.swap_in(0), vtensor.InvalidArgument, "slot 0 is not swapped out"),
    "truncate up": (lambda c: c.truncate(0, 11), vtensor.InvalidArgument, "has 10 tokens.*11"),
    "truncate below": (lambda c: c.truncate(0, -1), vtensor.InvalidArgument, "length is -1"),
    "publish too much": (lambda c: c.publish(0, range(11)), vtensor.InvalidArgument, "11 tokens.*has 10"),
    "publish other tokens": (lambda c: c.publish(1, [4] * 5), vtensor.InvalidArgument, "disagree"),
    "lengths that are none": (lambda c: c.step([10, "a", 0, 0, 0, 0]), vtensor.InvalidArgument, "6 integers"),
    "a length too large": (lambda c: c.step([2**70] * 6), vtensor.InvalidArgument, "6 integers"),
    "publish bytes": (lambda c: c.publish(0, b"\1" * 64), vtensor.InvalidArgument, "tokens is a bytes"),
    "publish what is no integer": (lambda c: c.publish(0, [1.5]), vtensor.InvalidArgument, "64 bits"),
    "publish too large a token": (lambda c: c.publish(0, [2**63]), vtensor.InvalidArgument, "64 bits"),
    "a salt of another kind": (lambda c: c.alloc([1], salt=[1]), vtensor.InvalidArgument, "salt is a list"),
    "expect fewer than no tokens": (lambda c: c.alloc(expect=-1), vtensor.InvalidArgument, "expect is -1"),
    "expect too many": (lambda c: c.alloc(expect=2**64), vtensor.InvalidArgument, "below 2"),
    "unshare from before": (lambda c: c.unshare(0, -1, 3), vtensor.InvalidArgument, "start is -1"),
    "wait for no layer": (lambda c: c.wait(0, -1), vtensor.InvalidArgument, "layer is -1"),
    "publish a matrix": (
        lambda c: c.publish(0, torch.zeros(2, 2, dtype=torch.long)),
        vtensor.InvalidArgument,
        r"shape \(2, 2\)",
    ),
    "unshare beyond": (lambda c: c.unshare(0, 5, 11), vtensor.InvalidArgument, "5 to 11.*10 tokens"),
    "unshare backwards": (lambda c: c.unshare(0, 5, 2), vtensor.InvalidArgument, "5 to 2"),
    "too many forks": (lambda c: c.fork(0, 9), vtensor.NoFreeSlot, "need 9 free slots, 3 of 6"),
    "fewer than no forks": (lambda c: c.fork(0, -1), vtensor.InvalidArgument, "n is -1"),
    "reorder unevenly": (lambda c: c.reorder([0, 1], [0]), vtensor.InvalidArgument, "2 slots and 1 sources"),
    "reorder from elsewhere": (lambda c: c.reorder([0], [1]), vtensor.InvalidArgument, "source 1 is none"),
    "reorder one twice": (
        lambda c: c.reorder([0, 0], [0, 0]),
        vtensor.InvalidArgument,
        "slot 0 is named twice",
    ),
    "no such layer": (lambda c: c[2], IndexError, "the cache has layers 0 to 1"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_told_and_changes_nothing(cache, what):
    call, error, words = BAD[what]
    prompt = [5] * UNIT
    a, b, c = cache.alloc(), cache.alloc(tokens=prompt), cache.alloc()
    assert (a, b, c) == (0, 1, 2)
    assert cache.step([10, UNIT, 4, 0, 0, 0])
    write(cache, 0, 0, range(10))
    assert cache.publish(1, prompt) == UNIT
    cache.swap_out(c)
    cache.wait(c)
    before = (cache.lengths, cache.stats())
    with pytest.raises(error, match=words):
        call(cache)
    after = (cache.lengths, cache.stats())
    assert before[0] == after[0]
    for name in ("slots_used", "slots_free", "slots_swapped", "pages_mapped", "pages_used", "prefix_tokens"):
        assert getattr(before[1], name) == getattr(after[1], name), name
    check_contents(cache, 0, range(10))
    assert cache.step([11, UNIT + 1, 0, 0, 0, 0]) and cache.swap_in(c)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": -1}, "num_kv_heads is -1"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_len": 0}, "max_len is 0"),
        ({"layer_group": 3}, "layer_group is 3, there are 2 layers"),
        ({"layout": "page"}, "layout is 'page'"),
        ({"windows": [1]}, "1 entries for 2 layers"),
        ({"windows": [0, None]}, "window of layer 0 is 0"),
        ({"lookahead": -1}, "lookahead is -1"),
        ({"tile": 0}, "tile is 0"),
        ({"device": "cuda:3"}, "cuda:3 and the pool"),
    ],
)
def test_a_cache_that_cannot_be(host, options, words):
    with pytest.raises(vtensor.InvalidArgument, match=re.escape(words)):
        make_cache(host, **options)
    assert host.stats().tensors == 0


def test_more_addresses_than_there_are(host):
    with pytest.raises(vtensor.CapacityExceeded, match="max_batch|capacity"):
        make_cache(host, max_batch=2**20, max_len=2**40)


def test_a_closed_cache_says_so(cache):
    cache.close()
    cache.close()
    for call in (lambda: cache.step([0] * MAX_BATCH), cache.alloc, lambda: cache[0], cache.stats):
        with pytest.raises(vtensor.Closed, match="closed"):
            call()
