"""The managers that stand beside ours hold, share and give up what they should: they may be compared."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from serving_support import FakeModel, alone, choose
from vtensor.replay.managers import PagedCache, RadixCache, StaticCache
from vtensor.serving import Engine, Request, Scheduler

FRAME = 4


class FramesWithContents(PagedCache):
    """Frames that hold what is written, as the device's memory would."""

    def __init__(self, *sizes, **options) -> None:
        super().__init__(*sizes, **options)
        self.frames = [[None] * self.frame_tokens for _ in range(sizes[0])]

    def place(self, slot, position):
        return self.frames[self.tables[slot][position // self.frame_tokens]], position % self.frame_tokens

    def read(self, slot, stop):
        return [frame[i] for frame, i in (self.place(slot, position) for position in range(stop))]

    def write(self, slot, start, values):
        for position, value in enumerate(values, start):
            assert self._refs[self.tables[slot][position // self.frame_tokens]] == 1, (
                "a write into a shared frame"
            )
            frame, i = self.place(slot, position)
            frame[i] = value

    def check(self):
        refs = Counter(frame for table in self.tables for frame in table)
        assert [refs[frame] for frame in range(len(self._refs))] == self._refs
        assert len(self._refs) + self._unused == len(self.frames)
        assert set(self._free) == {frame for frame, n in enumerate(self._refs) if n == 0}
        assert all(self._hash_of[frame] == known for known, frame in self._frame_of.items())


shapes = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=30),
    st.integers(1, 10),
    st.sampled_from(["", "other"]),
)


@given(shapes=st.lists(shapes, min_size=1, max_size=8), frames=st.integers(10, 40))
def test_paged_requests_get_their_own_tokens(shapes, frames):
    """Through sharing, eviction and preemption."""
    requests = [Request(i, prompt, new, salt=salt) for i, (prompt, new, salt) in enumerate(shapes)]
    cache = FramesWithContents(frames, 4, 64, frame_tokens=FRAME)
    engine = Engine(Scheduler(cache, token_budget=16), FakeModel(cache), choose)
    done = {}
    for request in requests:
        engine.submit(request)
    while engine.scheduler.unfinished:
        done |= {completion.id: completion for completion in engine.step()}
        cache.check()
    for request in requests:
        assert done[request.id].error or done[request.id].tokens == alone(request)
    assert not any(cache.tables)


def paged(frames=8, **options):
    return PagedCache(frames, 4, 64, frame_tokens=FRAME, **options)


def grown(cache, slot, length):
    lengths = [cache.length(i) for i in range(cache.max_batch)]
    lengths[slot] = length
    return cache.step(lengths)


def test_paged_reuses_full_frames_and_evicts_the_least_recent():
    cache = paged(frames=6)
    for tokens in ([1] * 9, [2] * 9):
        slot = cache.alloc(tokens)
        assert cache.length(slot) == 0 and grown(cache, slot, 9)
        assert cache.publish(slot, tokens) == 8
        cache.free(slot)
    first = cache.alloc([1] * 9)
    assert cache.length(first) == 8, "all full frames, and one token left to compute"
    other = cache.alloc([1] * 8)
    assert cache.length(other) == 4, "never all tokens"
    cache.free(other)
    cache.free(first)
    slot = cache.alloc()
    assert grown(cache, slot, 4 * 4), "two frames that nothing is known of, then those of [2] * 9"
    again = cache.alloc([2] * 9)
    assert cache.length(again) == 0
    cache.free(again)
    assert cache.length(cache.alloc([1] * 9)) == 8


def test_paged_hands_out_what_serves_no_prefix_first():
    cache = paged(frames=3)
    known, unknown = cache.alloc([1] * 8), cache.alloc()
    assert cache.step([8 if i == known else 1 if i == unknown else 0 for i in range(4)])
    cache.publish(known, [1] * 8)
    cache.free(known)
    cache.free(unknown)
    slot = cache.alloc()
    assert grown(cache, slot, 1) and cache.evictions == 0
    assert grown(cache, slot, 5) and cache.evictions == 1
    assert cache.length(cache.alloc([1] * 9)) == 4, "of a sequence the last frame went first"


def test_paged_short_of_frames_changes_nothing():
    cache = paged(frames=3)
    first, second = cache.alloc(), cache.alloc()
    assert grown(cache, first, 8)
    assert not grown(cache, second, 5)
    assert cache.tables[second] == [] and cache.length(second) == 0
    assert grown(cache, second, 4)


def test_static_slots():
    cache = StaticCache(tokens=100, max_batch=8, max_len=30)
    assert cache.max_batch == 3
    grown(cache, cache.alloc(), 10)
    assert cache.stats().waste == 2.0


def longest_known(published, tokens, unit):
    return max((n for n in range(0, len(tokens), unit) if tuple(tokens[:n]) in published), default=0)


@given(prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=20))
def test_the_ideal_cache_finds_every_prefix(prompts):
    cache = RadixCache(tokens=1000, max_batch=4, max_len=64, unit=FRAME)
    published = set()
    for prompt in prompts:
        slot = cache.alloc(prompt)
        assert cache.length(slot) == longest_known(published, prompt, FRAME)
        assert grown(cache, slot, len(prompt))
        cache.publish(slot, prompt)
        published |= {tuple(prompt[:n]) for n in range(0, len(prompt) + 1, FRAME)}
        cache.free(slot)


def test_the_ideal_cache_evicts_the_least_recently_used():
    cache = RadixCache(tokens=8, max_batch=4, max_len=64, unit=FRAME)
    for digit in (1, 2, 1):
        slot = cache.alloc([digit] * 5)
        assert grown(cache, slot, 4)
        cache.publish(slot, [digit] * 4)
        cache.free(slot)
    slot = cache.alloc()
    assert grown(cache, slot, 1)
    assert cache.length(cache.alloc([1] * 5)) == 4 and cache.length(cache.alloc([2] * 5)) == 0


def test_the_ideal_cache_is_full_to_the_last_token():
    """It publishes whole units alone, and evicts nothing before a token lacks."""
    cache = RadixCache(tokens=12, max_batch=4, max_len=64, unit=FRAME)
    slot = cache.alloc([1] * 7)
    assert grown(cache, slot, 7) and cache.publish(slot, [1] * 7) == 4
    cache.free(slot)
    slot = cache.alloc()
    assert grown(cache, slot, 8)
    user = cache.alloc([1] * 7)
    assert cache.length(user) == 4 and not grown(cache, slot, 9)
    cache.free(user)
    assert grown(cache, slot, 12)


def test_frames_cost_nothing_before_they_are_used():
    cache = PagedCache(2**60, 4, 64, frame_tokens=FRAME)  # a token of 4 bytes, in much memory
    assert cache.step([9, 0, 0, 0]) and cache.tables[0] == [0, 1, 2]


@given(shapes=st.lists(shapes, min_size=1, max_size=10), tokens=st.integers(45, 100))
def test_the_ideal_cache_wastes_nothing(shapes, tokens):
    """Live tokens, each published unit once, and what is free are all there is."""
    cache = RadixCache(tokens, max_batch=4, max_len=64, unit=FRAME)
    scheduler = Scheduler(cache, token_budget=16)
    for i, (prompt, new, salt) in enumerate(shapes):
        scheduler.add(Request(i, prompt, new, salt=salt))
    while scheduler.unfinished:
        plan = scheduler.plan()
        private = sum(n - held * FRAME for n, held in zip(cache._lengths, cache._held, strict=True))
        assert cache._tokens_free + private + len(cache._users) * FRAME == tokens
        assert cache._tokens_free >= 0
        used = Counter(
            unit for units, held in zip(cache._hashes, cache._held, strict=True) for unit in units[:held]
        )
        assert {unit: n for unit, n in cache._users.items() if n} == used
        assert set(cache._idle) == {unit for unit, n in cache._users.items() if n == 0}
        assert not plan.failed
        scheduler.complete(plan, [i % 2 for i in range(len(plan.sampled))])
    assert scheduler.stats.finished == len(shapes)
