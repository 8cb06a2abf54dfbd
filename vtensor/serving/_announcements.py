"""Requests that begin with the next iteration, while the mapper maps their prompts."""

from __future__ import annotations

from vtensor.kv import KVCache
from vtensor.serving._commit import Change
from vtensor.serving.plans import slot_of, target
from vtensor.serving.requests import SampleGroup
from vtensor.serving.slots import KVCacheManager

__all__ = ["Announcements"]

_MOST = 4  # iterations for which a request waits until it is mapped


class Announcements:
    """The first waiting requests. They have a slot already, and the mapper maps pages for them.

    There are none if the cache does not look ahead.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache if isinstance(cache, KVCache) and cache.lookahead > 0 else None
        self._iterations: dict[SampleGroup, int] = {}  # since each of them was announced

    def __contains__(self, group: SampleGroup) -> bool:
        return group in self._iterations

    def sequences_beside(self, group: SampleGroup) -> int:
        """Sequences of the other announced requests, each of which will take a slot."""
        return sum(len(other.live) for other in self._iterations if other is not group)

    def must_wait(self, group: SampleGroup, lengths: list[int]) -> bool:
        """Whether to announce a request that needs these lengths, or to announce it again: it is not mapped,
        and has not waited long enough."""
        if self._cache is None or self._iterations.get(group) == _MOST:
            return False
        return group not in self._iterations or not self._cache.prepare(lengths)

    def announce(self, group: SampleGroup) -> Change:
        return self._iterations.__setitem__, group, self._iterations.get(group, 0) + 1

    def drop(self, group: SampleGroup) -> Change:
        return self._iterations.pop, group, None

    def clear(self) -> None:
        self._iterations.clear()

    def with_prompts(self, lengths: list[int]) -> list[int]:
        """A copy of ``lengths``, with the prompts of announced requests."""
        lengths = lengths.copy()
        for group in self._iterations:
            lengths[slot_of(group.live[0])] = target(group.live[0])
        return lengths

    def look_ahead(self, lengths: list[int]) -> None:
        """Has the mapper map what is known of the next iteration while this one is computed: one more token
        of each slot, and the prompts of announced requests if there is room for them too.

        Args:
            lengths: the lengths after this iteration.
        """
        if self._cache is None:
            return
        ahead = [length and length + 1 for length in lengths]
        self._cache.prepare(ahead)
        if self._iterations:
            self._cache.prepare(self.with_prompts(ahead))
