"""PagedAttention's memory manager, as a baseline: frames of 16 tokens, and a table of frames for each
sequence.

After vLLM's paper (Kwon et al., SOSP 2023) and its documentation of automatic prefix caching. vLLM's block is
called a frame here, and a page is always the driver's. Frames are reference-counted. A full frame is indexed
by a hash over its tokens and all tokens before them. Once its last user has gone, it stays in the index until
its memory is needed. The least recently used frame is evicted first, and of one sequence the last frame. Only
full frames are shared, so no write goes to a shared one.

One choice is better than the documented one: frames outside the index are handed out before frames that could
still be reused as a prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from vtensor.errors import InvalidArgument
from vtensor.replay.baselines import ManagerStats, OneSample


class PagedCache(OneSample):
    """The calls of ``vtensor.KVCache`` over tables of frames. It has the tables only, and no memory.

    Args:
        frames: frames in the device's memory.
        max_batch, max_len: as for :class:`OneSample`.
        frame_tokens: tokens of a frame.

    ``tables[slot]`` lists the frames of a sequence. It does not check that slots are in use or that lengths
    do not shrink.
    """

    def __init__(self, frames: int, max_batch: int, max_len: int, *, frame_tokens: int = 16) -> None:
        if frames < 1:
            raise InvalidArgument(
                f"[PagedCache] memory for {frames} frames of {frame_tokens} tokens: give it more"
            )
        super().__init__(max_batch, max_len)
        self.frame_tokens = frame_tokens
        self.tables: list[list[int]] = [[] for _ in range(max_batch)]
        self.evictions = 0
        # The length up to which each slot needs no new frame.
        self._room = [0] * max_batch
        self._refs = [0] * frames
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(frames))  # next to use first
        self._frame_of: dict[int, int] = {}  # by the hash of a full frame and all before it
        self._hash_of: list[int | None] = [None] * frames

    # ------------------------------------------------------------------ the four calls

    def alloc(self, tokens: Sequence[int] | None = None, *, salt: str = "", expect: int = 0) -> int:
        slot = self._free_slots.pop()
        if tokens is None:
            return slot
        table, hashes = self.tables[slot], self._hashed(slot, tokens, salt, self.frame_tokens)
        for known in hashes[: (len(tokens) - 1) // self.frame_tokens]:
            frame = self._frame_of.get(known)
            if frame is None:
                break
            if self._refs[frame] == 0:
                del self._free[frame]
            self._refs[frame] += 1
            table.append(frame)
        self._room[slot] = len(table) * self.frame_tokens
        self._lengths[slot] = self._room[slot]
        return slot

    def step(self, lengths: Sequence[int]) -> bool:
        size, grown = self.frame_tokens, self._grown(lengths)
        if self._frames_for(grown, lengths) > len(self._free):
            return False
        for slot in grown:
            table = self.tables[slot]
            while len(table) * size < lengths[slot]:
                table.append(self._take())
            self._room[slot] = len(table) * size
        self._lengths = list(lengths)
        return True

    def fits(self, lengths: Sequence[int]) -> bool:
        return self._frames_for(self._grown(lengths), lengths) <= len(self._free)

    def free(self, slot: int) -> None:
        super().free(slot)
        for frame in reversed(self.tables[slot]):
            self._refs[frame] -= 1
            if self._refs[frame] == 0:
                self._free[frame] = None
                if self._hash_of[frame] is None:
                    self._free.move_to_end(frame, last=False)
        self.tables[slot], self._room[slot] = [], 0

    def _grown(self, lengths: Sequence[int]) -> list[int]:
        """The slots whose new lengths are above their room."""
        return [slot for slot, (n, room) in enumerate(zip(lengths, self._room, strict=True)) if n > room]

    def _frames_for(self, slots: list[int], lengths: Sequence[int]) -> int:
        return sum(-(-lengths[slot] // self.frame_tokens) - len(self.tables[slot]) for slot in slots)

    def _take(self) -> int:
        frame, _ = self._free.popitem(last=False)
        known = self._hash_of[frame]
        if known is not None:
            del self._frame_of[known]
            self._hash_of[frame] = None
            self.evictions += 1
        self._refs[frame] = 1
        return frame

    # ------------------------------------------------------------------ sharing

    def publish(self, slot: int, tokens: Sequence[int], *, salt: str = "") -> int:
        table, hashes = self.tables[slot], self._hashed(slot, tokens, salt, self.frame_tokens)
        full = len(tokens) // self.frame_tokens
        for known, frame in zip(hashes[:full], table, strict=False):
            if known not in self._frame_of and self._hash_of[frame] is None:
                self._frame_of[known] = frame
                self._hash_of[frame] = known
        return full * self.frame_tokens

    # ------------------------------------------------------------------ counting

    def stats(self) -> ManagerStats:
        used = [slot for slot, table in enumerate(self.tables) if table]
        live = sum(self._lengths[slot] for slot in used)
        held = sum(len(self.tables[slot]) for slot in used) * self.frame_tokens
        return ManagerStats(unit=self.frame_tokens, tokens=live, waste=held / live - 1 if live else 0.0)
