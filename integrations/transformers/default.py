"""Makes ``VTensorCache`` the cache of every ``generate()`` that makes its own cache.

``install()`` replaces one method, ``GenerationMixin._prepare_cache_for_generation`` of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin

from vtensor import InvalidArgument, Pool

from .cache import TwoHalves, VTensorCache, check_pool, growing
from .release import CACHE

_METHOD = "_prepare_cache_for_generation"
_CACHE_NAMES = (CACHE, "cache_params")

_original: Callable[..., None] | None = None


def install(pool: Pool | None = None) -> None:
    """Makes ``generate()`` without a cache of the caller's use a ``VTensorCache``, not a ``DynamicCache``.

    With another ``cache_implementation=``, ``generate()`` uses that. The caches have no ``max_len``, and give
    their memory back with the last reference to them.

    Args:
        pool: the pool of the pages. Defaults to the default pool of the device on which a model runs.

    Raises:
        InvalidArgument: if it is installed already, or ``pool`` is no pool.
    """
    global _original
    if _original is not None:
        raise InvalidArgument(
            "[install] VTensorCache is generate()'s default already: call uninstall() first"
        )
    check_pool("install", pool)
    original: Callable[..., None] = getattr(GenerationMixin, _METHOD)

    def _prepare_cache_for_generation(
        model: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        given = {name for name in _CACHE_NAMES if model_kwargs.get(name) is not None}
        original(model, generation_config, model_kwargs, *args, **kwargs)
        for name in _CACHE_NAMES:
            if name not in given and model_kwargs.get(name) is not None:
                cache = _growing(model_kwargs[name], pool, generation_config.compile_config is not None)
                if generation_config.is_assistant:
                    cache.activate_past_recording()
                model_kwargs[name] = cache

    try:
        setattr(GenerationMixin, _METHOD, _prepare_cache_for_generation)
        _original = original
    except BaseException:  # from outside: uninstall() would not know of it (I17)
        setattr(GenerationMixin, _METHOD, original)
        raise


def uninstall() -> None:
    """Undoes ``install()``: ``generate()`` uses a ``DynamicCache`` again. Existing caches keep working.

    Raises:
        InvalidArgument: if it is not installed.
    """
    global _original
    if _original is None:
        raise InvalidArgument("[uninstall] VTensorCache is not generate()'s default: nothing to undo")
    setattr(GenerationMixin, _METHOD, _original)
    _original = None


@contextmanager
def installed(pool: Pool | None = None) -> Iterator[None]:
    """A context manager that calls ``install(pool)``, and ``uninstall()`` at the end."""
    install(pool)
    try:
        yield
    finally:
        uninstall()


def _growing(cache: Any, pool: Pool | None, compiled: bool) -> Any:
    if type(cache) is DynamicCache and cache.layers:
        made = VTensorCache.over(cache, compiled)
        made.layers = [growing(layer, None, pool) for layer in cache.layers]
        return made
    if type(cache) is EncoderDecoderCache and type(cache.self_attention_cache) is DynamicCache:
        halves = cache.self_attention_cache, cache.cross_attention_cache
        return TwoHalves(*(_growing(half, pool, compiled) for half in halves))
    return cache
