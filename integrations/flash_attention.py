"""FlashAttention's functions over tensors that grow: flash_attn_func, _varlen_func and _with_kvcache.

Each takes what the function of the same name in the installed package takes, in the same order, and passes it
on unchanged; ``k`` and ``v`` may be VTensors, or layers of a KVCache and views of them. Before the call the
rows that the kernel appends and the tiles that it reads are mapped, or known to be; lengths past the end, and
what would make it copy the whole cache in silence, are refused; and the pages are leased. Lengths in a tensor
on a device are not looked at, because that would wait for it.

Which package: the first that is installed of the list below that suits the device of ``q``, or the one named
by ``backend=``. Names are ``"fa2"`` (module ``flash_attn``), ``"fa3"`` (``flash_attn_interface``), ``"fa4"``
(``flash_attn.cute``) and ``"torch"``, which is always there: torch's own kernels on CUDA and SDPA on a CPU.

    ==================  =========================
    compute capability  order
    ==================  =========================
    8.x                 fa2, torch
    9.x                 fa3, fa2, fa4, torch
    10.x, 11.x          fa4, fa2, torch
    others, CPU         fa2 on CUDA, then torch
    ==================  =========================

FlashAttention 3 and 4 read whole tiles, up to 224 rows past a row's length but never past the tensor they are
given, and NaN there reaches the output (pull request 2407 of Dao-AILab/flash-attention). A VTensor is handed
over at its exact length, and so nothing unmapped is read. A FullExtent is covered for 256 rows behind its
owner's length, which read as zeros. Rows shorter than the VTensor, told by a tensor of lengths, are read up
to the VTensor's length: what lies there is the caller's, and has to be finite.

A KVCache has mapped what ``step`` was told, and maps nothing here: of a layer, the slots must have the tokens
that are read and those that are appended. ``step`` says so first.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from vtensor import InvalidArgument, KVCache, VTensor, VTensorError
from vtensor.demands import Demands, Unknown, suit

from ._cache_layer import cache_of, check_tile
from ._flash_lengths import check_leftpad, check_within, read_in_rows, read_packed, rows_read, told
from ._kv import (
    KV,
    as_laid_out,
    check_pair,
    check_rank,
    check_rows,
    leased,
    owner_of,
    plain_views,
)
from .full_extent import FullExtent

__all__ = [
    "NotInstalled",
    "available",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "look_again",
]

_POSITIONS = 1  # of [B, S, H, D]
_LARGEST_TILE = 224  # rows, of 3 and 4
_READS_PAST = 256  # rows behind the longest that are covered for those


class NotInstalled(VTensorError, ImportError):
    """The FlashAttention that ``backend=`` names cannot be imported; ``__cause__`` says why."""


@dataclass(frozen=True)
class _Package:
    title: str
    module: str
    install: str
    reads_tiles: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    """Empty: any, of any strides."""


_PACKAGES = {
    "fa2": _Package("FlashAttention 2", "flash_attn", "pip install flash-attn --no-build-isolation"),
    "fa3": _Package(
        "FlashAttention 3",
        "flash_attn_interface",
        "git clone https://github.com/Dao-AILab/flash-attention && pip install ./flash-attention/hopper "
        "--no-build-isolation",
        reads_tiles=True,
        dtypes=(torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    ),
    "fa4": _Package("FlashAttention 4", "flash_attn.cute", "pip install flash-attn-4", reads_tiles=True),
    "torch": _Package("torch", f"{__package__}._torch_flash", "pip install torch", dtypes=()),
}
_ORDER = {8: ("fa2",), 9: ("fa3", "fa2", "fa4"), 10: ("fa4", "fa2"), 11: ("fa4", "fa2")}
_LARGEST_HEAD = 256
_NEW = Demands(4, 2, same_rows=False, grouped=False)  # [B, n, H, D], for a cache [rows, S, H, D]
_PAGED = frozenset(("block_table", "page_table", "cu_seqlens_k_new"))
_APART = _PAGED | {"cache_batch_idx"}  # of a call with one of these, lengths are not those of the first rows


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One function of one package."""

    name: str  # "fa2.flash_attn_func"
    operation: str
    package: _Package
    call: Callable[..., Any]
    names: Mapping[str, None]  # of the parameters behind v, in order
    takes_any_name: bool
    demands: Demands | Unknown

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """What was passed behind v, by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


def available() -> tuple[str, ...]:
    """The backends that can be imported here, of ``"fa2"``, ``"fa3"``, ``"fa4"`` and ``"torch"``."""
    return tuple(name for name in _PACKAGES if not isinstance(_load(name, "flash_attn_func"), ImportError))


def look_again() -> None:
    """Has the next call look for packages anew, as after one was installed while this process runs."""
    _find.cache_clear()
    _load.cache_clear()


def flash_attn_func(
    q: torch.Tensor, k: KV, v: KV, *args: Any, backend: str | None = None, **kwargs: Any
) -> Any:
    """``flash_attn_func`` of the package that is used, over all positions of ``k`` and ``v``.

    Args:
        q: ``[B, Sq, Hq, D]``.
        k, v: ``[B, Sk, Hkv, D]``: plain tensors, views of a KVCache's layer, or VTensors that grow along
            dimension 1; those that grow along dimension 2, ``[B, Hkv, Sk, D]``, are transposed.
        args, kwargs: as that package's function takes them.
        backend: ``"fa2"``, ``"fa3"``, ``"fa4"`` or ``"torch"``; by the device of ``q`` if None.

    Returns:
        What the kernel returns: ``[B, Sq, Hq, D]``, and more where asked for.

    Raises:
        NotInstalled: ``backend`` names a package that is not there.
        InvalidArgument: an argument the package does not have, a dtype or head size it refuses, strides for
            which it would copy K and V, as many sequences as K has not, positions that a KVCache's slot has
            not, or a FullExtent, whose rows have lengths that this function cannot be told.
    """
    kernel = _kernel("flash_attn_func", backend, q.device)
    found = kernel.demands.plain(q, k, v)
    if found is not None:  # what is asked below is known then
        return _launch(kernel, q, found, args, kwargs, k, v)
    for name, t in (("k", k), ("v", v)):
        if isinstance(t, FullExtent):
            raise InvalidArgument(
                f"[flash_attn_func] {name} is a FullExtent, and this function takes no lengths: use "
                "flash_attn_with_kvcache(cache_seqlens=), or pass the VTensor"
            )
    keys, values = plain_views(k, v, _POSITIONS)
    if not kernel.demands.met(q, keys, values):
        _check(kernel, q, keys, values)
    needed = [keys.shape[_POSITIONS]] * keys.shape[0]
    cache = cache_of("flash_attn_func", keys, values, _POSITIONS, needed)
    return _launch(kernel, q, (keys, values, cache), args, kwargs, k, v)


def flash_attn_varlen_func(
    q: torch.Tensor, k: KV, v: KV, *args: Any, backend: str | None = None, **kwargs: Any
) -> Any:
    """``flash_attn_varlen_func`` of the package that is used, over packed sequences.

    Args:
        q: ``[Tq, Hq, D]``.
        k, v: ``[Tk, Hkv, D]``: plain tensors, a slot of a KVCache's layer, or VTensors that grow along
            dimension 0. FlashAttention 3 and 4 also take ``[B, S, Hkv, D]`` with ``seqused_k`` and no
            ``cu_seqlens_k``.
        args, kwargs, backend: as for :func:`flash_attn_func`.

    Raises:
        NotInstalled: as for :func:`flash_attn_func`.
        InvalidArgument: as there; rows are given where packed sequences are asked for; ``cu_seqlens_q`` or
            ``cu_seqlens_k`` are not int32, are of other numbers of sequences, or go back; they or
            ``seqused_k`` go past the end, as far as the host knows them; or a KVCache of smaller tiles than
            the package reads.
    """
    kernel = _kernel("flash_attn_varlen_func", backend, q.device)
    given = kernel.given(args, kwargs) if args else kwargs
    starts = given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    found = kernel.demands.plain(q, k, v, starts[1], starts[0])
    if found is not None:
        return _launch(kernel, q, found, args, kwargs, k, v)
    takes_rows = "seqused_k" in kernel.names and starts[1] is None
    for name, t in (("k", k), ("v", v)):
        if isinstance(t, FullExtent) or (t.ndim != 3 and not takes_rows):
            raise InvalidArgument(
                f"[flash_attn_varlen_func] {name} has rows that lie apart, and sequences are to be packed as "
                f"[tokens, heads, head size]: pass {name}[0] where there is one row, or use "
                "flash_attn_with_kvcache(cache_seqlens=)"
            )
    keys, values = plain_views(k, v, _POSITIONS)
    if not kernel.demands.met(q, keys, values):
        _check(kernel, q, keys, values)
    rows = keys.ndim == 4  # of one sequence each, instead of packed ones
    needed = (read_in_rows if rows else read_packed)(kernel.operation, q, keys, given)
    holds_dim = _POSITIONS if rows else 0
    cache = cache_of(kernel.operation, keys, values, holds_dim, needed)
    _check_tile(kernel, q, cache, needed, keys.shape[holds_dim])
    return _launch(kernel, q, (keys, values, cache), args, kwargs, k, v)


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: KV, v_cache: KV, *args: Any, backend: str | None = None, **kwargs: Any
) -> Any:
    """``flash_attn_with_kvcache`` of the package that is used: attention over a cache, with an append.

    Where ``k`` and ``v`` (new positions ``[B, n, Hkv, D]``) are given, VTensors grow so that the kernel finds
    room for ``n`` more behind the longest row, and no further. Lengths in a tensor on a device, which the
    host does not know, must have their longest row at the VTensors' length, which then grows by ``n``; where
    rows end, truncate to the longest that is left. Pages there that are shared with a fork are parted first.

    Args:
        q: ``[B, Sq, Hq, D]``.
        k_cache, v_cache: ``[rows, S, Hkv, D]``: plain tensors, which are passed on as they are; a layer of a
            KVCache, whose slots :meth:`KVCache.step` has made ready for what is read and appended; VTensors,
            at exactly their length, or that of an int ``cache_seqlens``; or FullExtents, for a shape that
            never changes.
        args, kwargs, backend: as for :func:`flash_attn_func`.

    Returns:
        What the kernel returns. If it raises, the lengths are as before.

    Raises:
        NotInstalled: as for :func:`flash_attn_func`.
        InvalidArgument: as there; lengths above the cache's, no room for what is appended in plain tensors,
            or rows that it has not, as far as the host knows them; lengths, or padding on the left, of
            another dtype or number, and padding past a length; a KVCache of smaller tiles than the package
            reads.
        CapacityExceeded, OutOfPages, DriverError: as for ``VTensor.extend``.
    """
    operation = "flash_attn_with_kvcache"
    kernel = _kernel(operation, backend, q.device)
    given = kernel.given(args, kwargs) if args else kwargs
    lengths = given.get("cache_seqlens")
    if "cache_leftpad" in given and (leftpad := given["cache_leftpad"]) is not None and not _paged(given):
        check_leftpad(operation, q, leftpad, lengths, _held(k_cache))
    room = None
    if _APART.isdisjoint(given) or all(given[name] is None for name in _APART & given.keys()):
        new_k, new_v = given.get("k"), given.get("v")
        if new_k is None or type(k_cache) is not VTensor:
            found = kernel.demands.plain(q, k_cache, v_cache, lengths, None, new_k, new_v)
            if found is not None:
                return _launch(kernel, q, found, args, kwargs, k_cache, v_cache)
        else:
            room = kernel.demands.room(q, k_cache, v_cache, lengths, new_k, new_v)
    k_owner: Any = k_cache
    v_owner: Any = v_cache
    if room is None:
        k_owner, v_owner = owner_of(k_cache), owner_of(v_cache)
        if k_owner is None and v_owner is None:
            assert isinstance(k_cache, torch.Tensor) and isinstance(v_cache, torch.Tensor)
            cache = _check_plain(kernel, q, k_cache, v_cache, given)
            return _launch(kernel, q, (k_cache, v_cache, cache), args, kwargs, k_cache, v_cache)
        if k_owner is None or v_owner is None:
            raise InvalidArgument(
                f"[{operation}] one of k_cache and v_cache is a plain tensor: give VTensors, or views of both"
            )
        room = _room(kernel, q, k_owner, v_owner, given)
    holds, shortest, longest, added = room
    stop = longest + added
    try:
        if stop > holds:
            k_owner.extend(stop - holds)
            v_owner.extend(stop - holds)
        if added and not (type(k_owner) is VTensor is type(v_owner)):  # pages that no write parts (I6)
            k_owner.own(shortest, stop)
            v_owner.own(shortest, stop)
        exact = None if isinstance(lengths, torch.Tensor) else stop
        found = kernel.demands.plain(q, k_cache, v_cache, exact)
        if found is not None:
            return _launch(kernel, q, found, args, kwargs, k_cache, v_cache)
        keys, values = plain_views(k_cache, v_cache, _POSITIONS)
        if exact is None:
            if kernel.package.reads_tiles:
                keys, values = _covered(k_cache, keys), _covered(v_cache, values)
        elif stop < holds:
            keys, values = keys[:, :stop], values[:, :stop]
        if not kernel.demands.met(q, keys, values):
            _check(kernel, q, keys, values)
        return _launch(kernel, q, (keys, values, None), args, kwargs, k_cache, v_cache)
    except BaseException:
        for owner in (k_owner, v_owner):
            if owner.length > holds:
                owner.truncate(holds)
        raise


def _room(
    kernel: _Kernel, q: torch.Tensor, k_owner: VTensor, v_owner: VTensor, given: Mapping[str, Any]
) -> tuple[int, int, int, int]:
    """What VTensors are to hold for a kernel that is given ``given``: see ``Demands.room``, of which this
    explains what does not suit, and takes what it cannot tell at a glance."""
    operation = kernel.operation
    if name := _paged(given):
        raise InvalidArgument(
            f"[{operation}] {name} with a VTensor, whose rows are contiguous and grow alike: leave it out"
        )
    for name, owner in (("k_cache", k_owner), ("v_cache", v_owner)):
        check_rank(operation, name, owner, 4, "[rows, positions, heads, head size]")
    holds = k_owner.length
    if v_owner.length != holds:
        raise InvalidArgument(
            f"[{operation}] k_cache holds {holds} positions, v_cache {v_owner.length}: append to both"
        )
    rows_read(operation, q, k_owner.shape[0], given.get("cache_batch_idx"))
    lengths = given.get("cache_seqlens")
    shortest, longest = 0, holds  # as far as the host knows
    if lengths is None or isinstance(lengths, int):
        shortest = longest = holds if lengths is None else lengths
    elif known := told(operation, "cache_seqlens", q, lengths):
        shortest, longest = min(known), max(known)
    check_within(operation, "cache_seqlens", [shortest, longest], holds)
    return holds, shortest, longest, _added(kernel, q, k_owner, v_owner, given)


def _check_plain(
    kernel: _Kernel,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    given: Mapping[str, Any],
) -> KVCache | None:
    """The KVCache of plain tensors, once these are known to have what is read and written."""
    operation = kernel.operation
    paged = _paged(given)
    if not paged:
        for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
            check_rank(operation, name, t, 4, "[rows, positions, heads, head size]")
    if not kernel.demands.met(q, k_cache, v_cache):
        _check(kernel, q, k_cache, v_cache)
    if paged:  # where a row is a page, lengths say nothing of it
        return None
    lengths = given.get("cache_seqlens")
    added = _added(kernel, q, k_cache, v_cache, given)
    rows = rows_read(operation, q, k_cache.shape[0], given.get("cache_batch_idx"))
    holds = k_cache.shape[_POSITIONS]
    known = told(operation, "cache_seqlens", q, holds if lengths is None else lengths)
    if known is not None:
        check_within(operation, "cache_seqlens", known, holds, added)
    needed = None if known is None or rows is None else [n + added for n in known]
    cache = cache_of(operation, k_cache, v_cache, _POSITIONS, needed, rows)
    _check_tile(kernel, q, cache, needed, holds)
    return cache


def _covered(t: KV, view: torch.Tensor) -> torch.Tensor:
    """What a kernel that reads tiles is given for ``t``, whose rows' lengths the device knows: ``view``, or
    all of a FullExtent."""
    if not isinstance(t, FullExtent):
        return view
    t.cover(t.owner.length, tail=_READS_PAST)
    return as_laid_out(t.tensor, t.owner, _POSITIONS)


def _paged(given: Mapping[str, Any]) -> str:
    """The argument by which the cache or what is appended to it is said to lie otherwise than in rows."""
    return next((name for name in sorted(_PAGED) if given.get(name) is not None), "")


def _held(cache: KV) -> int:
    """The positions of a row."""
    owner = owner_of(cache)
    if owner is not None:
        return owner.length
    assert isinstance(cache, torch.Tensor)
    return cache.shape[_POSITIONS] if cache.ndim > _POSITIONS else 0


def _added(
    kernel: _Kernel,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    given: Mapping[str, Any],
) -> int:
    """How many positions the kernel is to append to each row of the caches, behind their lengths."""
    k, v = given.get("k"), given.get("v")
    if k is None and v is None:
        return 0
    if k is None or v is None or k.shape[:-1] != v.shape[:-1]:
        raise InvalidArgument(
            f"[{kernel.operation}] k and v are not of one shape: give as many new positions of both"
        )
    if given.get("cache_seqlens") is None:
        raise InvalidArgument(
            f"[{kernel.operation}] k and v without cache_seqlens: say behind how many positions they go"
        )
    for held, new in ((k_cache, k), (v_cache, v)):
        owner = owner_of(held)
        heads_first = owner is not None and owner.grow_dim == 2
        if heads_first or not suit(_NEW, new, held, held) or new.shape[0] != q.shape[0]:
            _check_new(kernel.operation, q, held, 1 if heads_first else 2, new)
    return int(k.shape[1])


def _check_new(
    operation: str, q: torch.Tensor, held: torch.Tensor, heads_dim: int, new: torch.Tensor
) -> None:
    """Refuses positions that are none of the sequences of ``q``, or of the cache ``held``."""
    of_new, of_held, of_q = new.shape, held.shape, q.shape
    # Packed queries do not say how many sequences they are.
    if len(of_new) != 4 or (len(of_q) == 4 and of_new[0] != of_q[0]):
        raise InvalidArgument(
            f"[{operation}] new positions are {list(of_new)}, q is {list(of_q)}: give "
            "[batch, positions, heads, head size] of the same batch"
        )
    heads = of_held[heads_dim]
    if of_new[2] != heads or of_new[3] != of_held[3] or new.dtype != held.dtype:
        raise InvalidArgument(
            f"[{operation}] new positions are {list(of_new)} of {new.dtype}, the cache has {heads} "
            f"heads of {of_held[3]}, {held.dtype}: was it made for another model?"
        )


def _check_tile(
    kernel: _Kernel, q: torch.Tensor, cache: KVCache | None, needed: Sequence[int] | None, holds: int
) -> None:
    """Refuses a cache of smaller tiles than the kernel's where a tile may go past what is mapped: never past
    the ``holds`` positions that the kernel is given."""
    if kernel.package.reads_tiles and (needed is None or min(needed, default=holds) < holds):
        check_tile(kernel.operation, q, cache, _LARGEST_TILE)


def _launch(
    kernel: _Kernel,
    q: torch.Tensor,
    taken: tuple[torch.Tensor, torch.Tensor, KVCache | None],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    k: KV,
    v: KV,
) -> Any:
    """Leases what ``k`` and ``v`` are, and calls with them as the kernel takes them: plain tensors, and the
    cache of whose layer they are."""
    if not kernel.takes_any_name and not kwargs.keys() <= kernel.names.keys():
        unknown = ", ".join(sorted(kwargs.keys() - kernel.names.keys()))
        raise InvalidArgument(
            f"[{kernel.operation}] {unknown}: no argument of {kernel.package.title}, which takes "
            f"{', '.join(kernel.names)}: leave it out, or choose another with backend="
        )
    keys, values, cache = taken
    if q.is_cpu:  # where nothing is leased, and each call of Python shows
        return kernel.call(q, keys, values, *args, **kwargs)
    with leased(q, owner_of(k), owner_of(v), cache=cache):
        return kernel.call(q, keys, values, *args, **kwargs)


def _check(kernel: _Kernel, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Refuses what the kernels refuse, and what makes them copy all of K and V before they start, where that
    is not known at a glance."""
    if kernel.operation == "flash_attn_func":
        for name, t in (("q", q), ("k", keys), ("v", values)):
            check_rank(kernel.operation, name, t, 4, "[batch, positions, heads, head size]")
        check_rows(kernel.operation, q, keys)
    check_pair(kernel.operation, q, keys, values, heads_dim=-2)
    if kernel.package.dtypes:
        _check_layout(kernel, "k", keys)
        _check_layout(kernel, "v", values)


def _check_layout(kernel: _Kernel, name: str, t: torch.Tensor) -> None:
    title = f"[{kernel.operation}] {kernel.package.title}"
    if t.dtype not in kernel.package.dtypes:
        takes = ", ".join(str(dtype).removeprefix("torch.") for dtype in kernel.package.dtypes)
        raise InvalidArgument(f"{title} takes {takes}, {name} is {t.dtype}: make the cache with one of these")
    size, item, strides = t.shape[-1], t.element_size(), t.stride()
    if size > _LARGEST_HEAD and name == "k":
        raise InvalidArgument(f"{title} takes head sizes up to {_LARGEST_HEAD}, {name} has {size}: use SDPA")
    if size * item % 16:
        raise InvalidArgument(
            f"{title} pads a head size of {size} and copies all of {name} at every call: make the cache "
            f"with a multiple of {16 // item}"
        )
    if strides[-1] != 1:
        raise InvalidArgument(
            f"{title} copies all of {name} at every call, because its last stride is {strides[-1]}: lay the "
            "head size out last"
        )
    if (not is_compiling() and t.data_ptr() % 16) or any(
        s * item % 16 for s, n in zip(strides[:-1], t.shape[:-1], strict=True) if n > 1
    ):
        raise InvalidArgument(
            f"{title} needs, or copies all of {name} for, an address and strides that are multiples of 16 "
            f"bytes; its strides are {list(strides)}: give each head a multiple of 16 bytes"
        )


def _kernel(operation: str, backend: str | None, device: torch.device) -> _Kernel:
    """The function that is used. A compiler, which cannot trace imports, takes its name for a constant, and
    finds it by that."""
    if is_dynamo_compiling():
        return _in_use[_name_of(operation, backend, device)]
    return _find(operation, backend, device)


def _name_of(operation: str, backend: str | None, device: torch.device) -> str:
    kernel = _find(operation, backend, device)
    name = kernel.name
    _in_use[name] = replace(kernel, demands=Unknown())
    return name


# All that torch.compiler.assume_constant_result does, which imports the compiler, for a second, to do it.
setattr(_name_of, "_dynamo_marked_constant", True)  # noqa: B010
_in_use: dict[str, _Kernel] = {}


@cache
def _find(operation: str, backend: str | None, device: torch.device) -> _Kernel:
    if backend is not None:
        if backend not in _PACKAGES:
            raise InvalidArgument(
                f"[{operation}] backend is {backend!r}: it must be one of {', '.join(map(repr, _PACKAGES))}"
            )
        found = _load(backend, operation)
        if isinstance(found, ImportError):
            package = _PACKAGES[backend]
            raise NotInstalled(
                f"[{operation}] {package.title} cannot be imported ({found}): {package.install}"
            ) from found
        return found
    order: tuple[str, ...] = ()
    if device.type == "cuda":
        order = _ORDER.get(torch.cuda.get_device_capability(device)[0], ("fa2",))
    loaded = (_load(name, operation) for name in (*order, "torch"))
    return next(kernel for kernel in loaded if isinstance(kernel, _Kernel))


@cache
def _load(backend: str, operation: str) -> _Kernel | ImportError:
    package = _PACKAGES[backend]
    try:
        module = importlib.import_module(package.module)
        call = getattr(module, operation, None)
        if call is None and backend == "fa4" and operation == "flash_attn_with_kvcache":
            from ._fa4_kvcache import with_kvcache

            call = with_kvcache(module)
        if call is None:
            raise ImportError(f"module {package.module} has no {operation}")
    except ImportError as error:
        return error
    parameters = inspect.signature(call).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    return _Kernel(
        f"{backend}.{operation}",
        operation,
        package,
        call,
        dict.fromkeys(names[3:]),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        Demands(
            *((3, 1) if operation == "flash_attn_varlen_func" else (4, 2)),
            same_rows=operation == "flash_attn_func",
            aligned=bool(package.dtypes),
            reads_tiles=package.reads_tiles,
        ),
    )
