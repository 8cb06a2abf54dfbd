"""The layer of ``VTensorCache`` for attention over the last tokens only.

Follows ``DynamicSlidingWindowLayer`` in ``transformers/cache_utils.py`` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from vtensor import InvalidArgument, Pool, VTensor

from .changes import finish
from .layers import VTensorLayer


class VTensorSlidingWindowLayer(VTensorLayer, DynamicSlidingWindowLayer):
    """K and V of a layer whose queries attend to the last ``sliding_window`` tokens only (sliding or
    chunked).

    As the window moves, K and V shrink at the front: pages before the window go back to the pool, and nothing
    is copied. Between two forward calls the layer holds the window and the last call's tokens, because an
    error in a later layer may have to drop these again.
    """

    def __init__(self, sliding_window: int, max_len: int | None = None, pool: Pool | None = None) -> None:
        VTensorLayer.__init__(self, max_len, pool)
        self.sliding_window = sliding_window
        self._sliding_window_tensor = torch.tensor(sliding_window, device="cpu")
        self.dropped = 0  # tokens before the first that K and V hold

    def get_seq_length(self) -> int:
        """Tokens so far. K and V hold the last of them."""
        return super().get_seq_length() if torch.compiler.is_compiling() else self.dropped + self._held()

    cumulative_length = property(get_seq_length)  # which transformers' own methods read

    def _assigned(self, owners: list[VTensor]) -> dict[str, Any]:
        if not self.record_past:
            self._trim()  # the side that stays, to the tokens that were to be seen of the other
        return {"dropped": self.get_seq_length() - min(owner.length for owner in owners)}

    def _held(self) -> int:
        return VTensorLayer.get_seq_length(self)

    def _traced_length(self) -> int:
        assert self._views is not None
        return self._before_views + self._views[0].shape[-2] - self.prepared

    get_max_length = DynamicSlidingWindowLayer.get_max_length

    def _stored(self, which: int) -> torch.Tensor | None:
        stored = super()._stored(which)
        return stored if stored is None or self.record_past else _last(stored, self.sliding_window - 1)

    def _visible(self, owner: VTensor, new: int) -> torch.Tensor:
        return _last(self._view(owner), self.sliding_window - 1 + new)

    def _before_growth(self, new: int) -> None:
        if not self.record_past:
            self._trim()
        super()._before_growth(new)

    def prepare(self, tokens: int) -> None:
        super().prepare(tokens)
        if self._views is not None and self.owners is not None:
            self._before_views = self.dropped + self.owners[0].length - self._views[0].shape[-2]

    def _after_growth(self, new: int) -> tuple[torch.Tensor, torch.Tensor]:
        views = super()._after_growth(new)
        # Most of a first prompt is never read again. To drop that step later means to drop everything, which
        # needs no tokens, so trim now.
        if not self.record_past and self._held() == new and self.dropped == 0:
            self._trim()
        return views

    def _trim(self) -> None:
        """Drops tokens that no later query attends to."""
        kept = self.sliding_window - 1
        dropped = self.dropped + self._held() - kept

        def trim() -> None:
            for owner in self.owners or ():
                if owner.length > kept:
                    owner.shrink(owner.length - kept, front=True)
            self.dropped = dropped

        if dropped > self.dropped:
            finish(trim)  # K, V and `dropped` must agree

    def truncate(self, length: int) -> None:
        """Keeps the first ``length`` tokens of the sequence.

        Raises:
            InvalidArgument: if tokens that the next query would attend to have been dropped.
        """
        if length < self.get_seq_length():
            super().truncate(self._left_of(length))
            if length == 0:
                self.dropped = 0

    def _left_of(self, length: int) -> int:
        """The number of held tokens among the first ``length`` of the sequence.

        Raises:
            InvalidArgument: if the next query would attend to tokens that have been dropped.
        """
        drop = self.get_seq_length() - length
        left = self._held() - drop
        if left >= min(length, self.sliding_window - 1):
            return left
        if length == 0:
            return 0
        raise InvalidArgument(
            f"[VTensorCache.crop] {drop} tokens back from {self.get_seq_length()}, but of a layer with a "
            f"window of {self.sliding_window} only the last {self._held()} are held: "
            "call activate_past_recording() before the tokens that may be taken back"
        )

    def plan_crop(self, tokens_to_remove: int) -> Callable[[], None]:
        """As ``VTensorLayer.plan_crop``, for a ``crop`` that then drops tokens that no later query attends
        to.

        Raises:
            InvalidArgument: if the window is full, and ``activate_past_recording()`` was not called or called
                too late.
        """
        if self.get_seq_length() >= self.sliding_window and not self.record_past:
            raise InvalidArgument(
                "[VTensorCache.crop] the window is full, and the tokens before it were dropped: "
                "call activate_past_recording() before the tokens that may be taken back"
            )
        cut = super().plan_crop(tokens_to_remove)
        self._left_of(max(0, self.get_seq_length() + tokens_to_remove))

        def crop() -> None:
            cut()
            self._trim()

        return crop

    def _released(self) -> dict[str, Any]:
        return super()._released() | {"dropped": 0}

    def __getstate__(self) -> dict[str, Any]:
        """Dense copies of the window's K and V. The pool is not saved."""
        state = super().__getstate__()
        held = state["dense"][0].shape[-2] if state["dense"] else 0
        return state | {"dropped": self.get_seq_length() - held}


def _last(view: torch.Tensor, tokens: int) -> torch.Tensor:
    surplus = view.shape[-2] - tokens
    return view[..., surplus:, :] if surplus > 0 else view
