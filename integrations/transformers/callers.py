"""Which model uses a cache, and for which ``generate()``.

transformers tells a cache neither; both are found on the stack of whoever calls it. Follows
``GenerationMixin.generate`` of transformers 5.23, and ``torch.nn.Module.__call__``.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from transformers import PreTrainedModel

from vtensor import InvalidArgument

__all__ = ["ForOneGeneration", "Generation", "Use", "calling_models"]

# What generate() calls to get or to mark its cache. An override has the same name, and calls the original.
_PREPARE = "_prepare_cache_for_generation"
# In its frame are the module and what it was called with, and nothing that would be kept from being freed.
_CALL: CodeType = torch.nn.Module._wrapped_call_impl.__code__

# Seconds for a generate() of another thread to return. A streamer tells its reader of the last token earlier
# than that, and the reader may go on with the same cache at once.
_RETURNING = 1.0

_taking = threading.Lock()


class Generation:
    """A ``generate()`` that has begun, known by the copy of the generation config that each makes.

    It is looked for on the stack: a traceback may keep the copy long after ``generate()`` has ended.
    """

    def __init__(self, generation_config: Any, code: CodeType) -> None:
        self.thread = threading.get_ident()
        self._code = code
        self._config = weakref.ref(generation_config)

    def runs(self) -> bool:
        """Whether it has not returned yet."""
        config = self._config()
        return config is not None and any(
            frame.f_code is self._code and frame.f_locals.get("generation_config") is config
            for frame in _frames(sys._current_frames().get(self.thread))
        )


class Use:
    """What a cache is used for: one ``generate()`` at a time."""

    def __init__(self) -> None:
        self._generation: Generation | None = None

    def begin(self, generation: Generation) -> None:
        """The cache is that generation's from now on.

        Raises InvalidArgument where an earlier one has not ended; one in another thread is given a second.
        """
        until = time.monotonic() + _RETURNING
        while True:
            with _taking:
                running = self._running()
                if running is None:
                    self._generation = generation
                    return
            if running.thread == generation.thread or time.monotonic() > until:
                self._refuse(running, "generate()")
            time.sleep(0.001)

    def check(self) -> None:
        """Raises InvalidArgument where a ``generate()`` of another thread uses the cache."""
        generation = self._generation
        if generation is None or generation.thread == threading.get_ident():
            return
        running = self._running()
        if running is None:
            self._generation = None
        else:
            self._refuse(running, "forward")

    def _running(self) -> Generation | None:
        generation = self._generation
        return generation if generation is not None and generation.runs() else None

    def _refuse(self, running: Generation, what: str) -> None:
        where = "in this thread" if running.thread == threading.get_ident() else "in another thread"
        raise InvalidArgument(
            f"[VTensorCache] a second {what} on this cache, while a generate() {where} runs on it: wait for "
            "that to return, or give each its own; copy.deepcopy(cache) makes one of the same content for "
            "nothing"
        )


class ForOneGeneration:
    """A cache that hears of each ``generate()`` before it launches anything."""

    _marked = False

    @property
    def _is_user_defined(self) -> bool:
        return self._marked

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # generate() sets it before anything else that it does with a cache it was given.
        found = _generation_in_preparation() if value else None
        if found is not None:
            self._generation_begins(*found)
        self._marked = value

    def _generation_begins(self, model: PreTrainedModel, generation: Generation) -> None:
        raise NotImplementedError


def _generation_in_preparation() -> tuple[PreTrainedModel, Generation] | None:
    """The model and the generation of the ``generate()`` that marks a cache right now; None where it is
    marked by something else."""
    frames = _frames(sys._getframe(1))
    for frame in frames:
        if frame.f_code.co_name == _PREPARE:
            model, generation_config = frame.f_locals["self"], frame.f_locals["generation_config"]
            generate = next(outer for outer in frames if outer.f_code.co_name != _PREPARE)
            return model, Generation(generation_config, generate.f_code)
    return None


def calling_models() -> Iterator[tuple[PreTrainedModel, Any]]:
    """Models whose forward uses the cache that asks, the innermost first, each with the
    ``past_key_values=`` that it was called with."""
    for frame in _frames(sys._getframe(1)):
        if frame.f_code is _CALL:
            module, arguments = frame.f_locals["self"], frame.f_locals["kwargs"]
            if isinstance(module, PreTrainedModel):
                yield module, arguments.get("past_key_values")


def _frames(innermost: FrameType | None) -> Iterator[FrameType]:
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back
