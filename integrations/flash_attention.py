"""FlashAttention's functions over tensors that grow: flash_attn_func, _varlen_func and _with_kvcache.

Each takes the arguments of the function of the same name in the installed package, in the same order, and
passes them on unchanged. ``k`` and ``v`` may be VTensors, or layers of a KVCache and views of them. Before
the call, the function makes sure that the rows that the kernel appends and the tiles that it reads are
mapped, and leases the pages. It refuses positions that a VTensor or a slot does not have. The package checks
all else. A tensor of lengths on a device is not read, because the host would have to wait for the device.

``backend=`` selects the package. It defaults to the first in the list below that is installed, by the device
of ``q``. Its values are ``"fa2"`` (module ``flash_attn``), ``"fa3"`` (``flash_attn_interface``), ``"fa4"``
(``flash_attn.cute``) and ``"torch"``, which is always installed: torch's own kernels on CUDA, and SDPA on a
CPU.

    ==================  =========================
    compute capability  order
    ==================  =========================
    8.x                 fa2, torch
    9.x                 fa3, fa2, fa4, torch
    10.x, 11.x          fa4, fa2, torch
    others, CPU         fa2 on CUDA, then torch
    ==================  =========================

FlashAttention 3 and 4 read whole tiles: up to 224 rows past a row's length, but never past the end of the
tensor. A NaN there reaches the output (pull request 2407 of Dao-AILab/flash-attention). A VTensor is passed
with its exact length, so no unmapped memory is read. A FullExtent is covered for 256 rows past its owner's
length, which hold zeros. If a tensor of lengths makes a row shorter than the VTensor, the kernel reads up to
the VTensor's length. The caller must keep those rows finite.

These functions map nothing for a KVCache. Call ``KVCache.step`` first, with lengths that include both the
tokens to read and the tokens to append.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from vtensor import InvalidArgument, VTensor, VTensorError
from vtensor.attention import views

from ._kv import KV, Taken, append, covered, leased, tensor_of, traced_views
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
_LARGEST_TILE = 224  # rows, in FlashAttention 3 and 4
_READS_PAST = 256  # rows to cover past the longest row for these two


class NotInstalled(VTensorError, ImportError):
    """The package that ``backend=`` names cannot be imported. ``__cause__`` says why."""


@dataclass(frozen=True)
class _Package:
    title: str
    module: str
    install: str
    tile: int = 0  # rows that it reads at once, past the lengths


_PACKAGES = {
    "fa2": _Package("FlashAttention 2", "flash_attn", "pip install flash-attn --no-build-isolation"),
    "fa3": _Package(
        "FlashAttention 3",
        "flash_attn_interface",
        "git clone https://github.com/Dao-AILab/flash-attention && pip install ./flash-attention/hopper "
        "--no-build-isolation",
        tile=_LARGEST_TILE,
    ),
    "fa4": _Package("FlashAttention 4", "flash_attn.cute", "pip install flash-attn-4", tile=_LARGEST_TILE),
    "torch": _Package("torch", f"{__package__}._torch_flash", "pip install torch"),
}
_ORDER = {8: ("fa2",), 9: ("fa3", "fa2", "fa4"), 10: ("fa4", "fa2"), 11: ("fa4", "fa2")}
# Arguments that give the cache, or what is appended to it, another layout than rows.
_NO_ROWS = ("block_table", "page_table", "cu_seqlens_k_new")


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One function of one package."""

    name: str  # "fa2.flash_attn_func"
    operation: str
    package: _Package
    call: Callable[..., Any]
    names: Sequence[str]  # of the parameters after v, in order
    views: Callable[..., Taken]

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments after v, by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


def available() -> tuple[str, ...]:
    """The backends that can be imported, among ``"fa2"``, ``"fa3"``, ``"fa4"`` and ``"torch"``."""
    return tuple(name for name in _PACKAGES if isinstance(_load(name, "flash_attn_func"), _Kernel))


def look_again() -> None:
    """Makes the next call search for packages again. Use it after installing one in a running process."""
    _find.cache_clear()
    _load.cache_clear()


def flash_attn_func(
    q: torch.Tensor, k: KV, v: KV, *args: Any, backend: str | None = None, **kwargs: Any
) -> Any:
    """Calls the package's ``flash_attn_func`` over all positions of ``k`` and ``v``.

    Args:
        q: ``[B, Sq, Hq, D]``.
        k, v: ``[B, Sk, Hkv, D]``: plain tensors, views of a KVCache's layer, or VTensors that grow along
            dimension 1. VTensors ``[B, Hkv, Sk, D]`` that grow along dimension 2 are transposed.
        args, kwargs: as for the package's function.
        backend: ``"fa2"``, ``"fa3"``, ``"fa4"`` or ``"torch"``. Defaults to one that suits the device of
            ``q``.

    Returns:
        The kernel's result: ``[B, Sq, Hq, D]``, and more if asked for.

    Raises:
        NotInstalled: if the package that ``backend`` names is not installed.
        InvalidArgument: if a slot of a KVCache does not have the positions, or one of two VTensors is
            shorter. Other errors are the package's.
    """
    kernel = _kernel("flash_attn_func", backend, q.device)
    keys, values = tensor_of(k), tensor_of(v)
    return _launch(kernel, q, kernel.views("flash_attn_func", keys, values), args, kwargs, keys, values)


def flash_attn_varlen_func(
    q: torch.Tensor, k: KV, v: KV, *args: Any, backend: str | None = None, **kwargs: Any
) -> Any:
    """Calls the package's ``flash_attn_varlen_func`` over packed sequences.

    Args:
        q: ``[Tq, Hq, D]``.
        k, v: ``[Tk, Hkv, D]``: plain tensors, a slot of a KVCache's layer, or VTensors that grow along
            dimension 0. FlashAttention 3 and 4 also take ``[B, S, Hkv, D]`` with ``seqused_k`` and no
            ``cu_seqlens_k``.
        args, kwargs, backend: as for :func:`flash_attn_func`.

    Raises:
        NotInstalled: as for :func:`flash_attn_func`.
        InvalidArgument: as for :func:`flash_attn_func`; if, as far as the host knows them, ``cu_seqlens_k``
            or ``seqused_k`` exceed a VTensor or a slot; or if a KVCache has smaller tiles than the package
            reads.
    """
    kernel = _kernel("flash_attn_varlen_func", backend, q.device)
    given = kernel.given(args, kwargs) if args else kwargs
    ends, rows = given.get("cu_seqlens_k"), None
    if ends is None:
        ends = given.get("seqused_k")
    if _lists_positions(given):
        ends, rows = None, 0
    keys, values = tensor_of(k), tensor_of(v)
    taken = kernel.views("flash_attn_varlen_func", keys, values, False, ends, 0, None, rows)
    tile = 0 if ends is None else kernel.package.tile
    return _launch(kernel, q, taken, args, kwargs, keys, values, tile=tile)


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: KV, v_cache: KV, *args: Any, backend: str | None = None, **kwargs: Any
) -> Any:
    """Calls the package's ``flash_attn_with_kvcache``: attention over a cache, with an append.

    If ``k`` and ``v`` (new positions ``[B, n, Hkv, D]``) are given, VTensors grow to ``n`` positions past the
    longest row, and no further. The host does not know lengths in a tensor on a device: the longest of them
    must be the VTensors' length, which then grows by ``n``. When rows end, truncate the VTensors to the
    longest that is left. Pages for the new positions that a fork shares are unshared first.

    Args:
        q: ``[B, Sq, Hq, D]``.
        k_cache, v_cache: ``[rows, S, Hkv, D]``. Plain tensors are passed on unchanged. The slots of a
            KVCache's layer must have the positions to read and to append, by :meth:`KVCache.step`. VTensors
            are passed with exactly their length, or with that of an int ``cache_seqlens``. FullExtents give a
            shape that never changes.
        args, kwargs, backend: as for :func:`flash_attn_func`.

    Returns:
        The kernel's result. If it raises, the lengths are as before.

    Raises:
        NotInstalled: as for :func:`flash_attn_func`.
        InvalidArgument: as for :func:`flash_attn_func`; if, as far as the host knows them, lengths exceed a
            VTensor or a slot, or a row does not exist; or if a KVCache has smaller tiles than the package
            reads.
        CapacityExceeded, OutOfPages, DriverError: as for ``VTensor.extend``.
    """
    operation = "flash_attn_with_kvcache"
    kernel = _kernel(operation, backend, q.device)
    given = kernel.given(args, kwargs) if args else kwargs
    lengths, index = given.get("cache_seqlens"), given.get("cache_batch_idx")
    new_k, new_v = given.get("k"), given.get("v")
    added = 0 if new_k is None or new_v is None or lengths is None else new_k.size(1)
    rows: Any = q
    if _lists_positions(given):
        lengths, index, added, rows = None, None, 0, 0
    keys, values = tensor_of(k_cache), tensor_of(v_cache)

    def launch(stop: Any, more: int) -> Any:
        k, v, cache = kernel.views(operation, keys, values, False, stop, more, index, rows)
        tile = kernel.package.tile
        if not isinstance(lengths, torch.Tensor):
            if stop is None or stop + more == k.shape[_POSITIONS]:
                tile = 0  # kernels never read past the end of a tensor
        elif tile:  # only the device knows how far it reads
            k = covered(k_cache, _POSITIONS, _READS_PAST) if isinstance(k_cache, FullExtent) else k
            v = covered(v_cache, _POSITIONS, _READS_PAST) if isinstance(v_cache, FullExtent) else v
        return _launch(kernel, q, (k, v, cache), args, kwargs, keys, values, tile=tile)

    grows = added and isinstance(keys, VTensor) and isinstance(values, VTensor)
    if not grows or kernel.views is traced_views:
        return launch(lengths, added)
    holds = keys.length
    shortest: Any = lengths
    longest: Any = lengths
    if isinstance(lengths, torch.Tensor):
        shortest, longest = 0, holds  # as far as the host knows
        if lengths.is_cpu and lengths.numel():
            shortest, longest = (int(length) for length in lengths.aminmax())
    if not (values.length == holds >= longest and shortest >= 0 and keys.grow_dim in (1, 2)):
        raise InvalidArgument(
            f"[{operation}] {added} positions are to be appended after {shortest} to {longest}, k_cache has "
            f"{holds}, v_cache {values.length}: give lengths within both, and caches that grow along them"
        )
    stop = longest + added
    try:
        if stop > holds:
            keys.extend(stop - holds)
            values.extend(stop - values.length)  # none if K and V are one tensor
        if not (type(keys) is VTensor is type(values)):  # no write can copy their pages (I6)
            keys.unshare(shortest, stop)
            values.unshare(shortest, stop)
        return launch(None if isinstance(lengths, torch.Tensor) else stop, 0)
    except BaseException:
        for owner in (keys, values):
            if owner.length > holds:
                owner.truncate(holds)
        raise


def _lists_positions(given: Mapping[str, Any]) -> bool:
    """Whether the kernel takes the positions to read or write from a list, such as a table of pages."""
    return any(given.get(name) is not None for name in _NO_ROWS)


def _launch(
    kernel: _Kernel,
    q: torch.Tensor,
    taken: Taken,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *tensors: Any,
    tile: int = 0,
) -> Any:
    """Leases the VTensors among ``tensors`` and calls the kernel with the tensors in ``taken``."""
    keys, values, cache = taken
    if q.is_cpu:  # no lease is needed, and each call in Python takes noticeable time
        return kernel.call(q, keys, values, *args, **kwargs)
    with leased(kernel.operation, q, *tensors, cache=cache, tile=tile):
        return kernel.call(q, keys, values, *args, **kwargs)


def _kernel(operation: str, backend: str | None, device: torch.device) -> _Kernel:
    """The function to call.

    torch.compile cannot trace imports. It takes the function's name as a constant and looks the function up
    by it.
    """
    if is_dynamo_compiling():
        return _in_use[_name_of(operation, backend, device)]
    return _find(operation, backend, device)


def _name_of(operation: str, backend: str | None, device: torch.device) -> str:
    kernel = _find(operation, backend, device)
    _in_use[kernel.name] = replace(kernel, views=traced_views)
    return kernel.name


# torch.compiler.assume_constant_result does only this, but imports the compiler, which takes a second.
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
        if isinstance(found, Exception):
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
def _load(backend: str, operation: str) -> _Kernel | Exception:
    """The function, or why it cannot be imported: a package may raise anything beside wrong versions of
    others."""
    package = _PACKAGES[backend]
    try:
        module = importlib.import_module(package.module)
        call = getattr(module, operation, None)
        if call is None and backend == "fa4" and operation == "flash_attn_with_kvcache":
            call = _fa4_with_kvcache(module)
        if call is None:
            raise ImportError(f"module {package.module} has no {operation}")
    except Exception as error:
        return error
    parameters = inspect.signature(call).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    return _Kernel(f"{backend}.{operation}", operation, package, call, names[3:], views)


def _fa4_with_kvcache(module: Any) -> Callable[..., Any]:
    """``flash_attn_with_kvcache`` over ``flash_attn.cute``, which has the attention but not the append.

    Passes lengths in a tensor as ``seqused_k``. For other lengths, it passes K and V of exactly that length.
    """

    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        cache_seqlens: int | torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (-1, -1),
        softcap: float = 0.0,
        num_splits: int = 1,
        return_softmax_lse: bool = False,
    ) -> Any:
        added = 0 if k is v is None else append(q, k_cache, v_cache, k, v, cache_seqlens)
        batch = q.shape[0]
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]  # this package takes no further rows
        options: dict[str, Any] = {
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": tuple(None if side is None or side < 0 else side for side in window_size),
            "softcap": softcap,
            "num_splits": num_splits,
        }
        if return_softmax_lse:
            options["return_lse"] = True
        if isinstance(cache_seqlens, torch.Tensor):
            options["seqused_k"] = cache_seqlens + added if added else cache_seqlens
            result = module.flash_attn_varlen_func(q, k_cache, v_cache, **options)
        else:
            stop = k_cache.shape[1] if cache_seqlens is None else cache_seqlens + added
            result = module.flash_attn_func(
                q, k_cache.narrow(1, 0, stop), v_cache.narrow(1, 0, stop), **options
            )
        out, lse = result if isinstance(result, tuple) else (result, None)
        return (out, lse) if return_softmax_lse else out

    return flash_attn_with_kvcache
