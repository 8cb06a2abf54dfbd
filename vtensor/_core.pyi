"""
The C++ half of vtensor; use the classes of the package `vtensor` instead.
"""

from collections.abc import Sequence
import enum


class ZeroPolicy(enum.Enum):
    never = 0

    new_owner = 1

    always = 2

class PoolCounts:
    @property
    def budget_pages(self) -> int: ...

    @property
    def used(self) -> int: ...

    @property
    def private_copies(self) -> int: ...

    @property
    def spare(self) -> int: ...

    @property
    def quarantined(self) -> int: ...

    @property
    def in_children(self) -> int: ...

    @property
    def in_page_sets(self) -> int: ...

    @property
    def mapped(self) -> int: ...

    @property
    def active(self) -> int: ...

    @property
    def prefetched(self) -> int: ...

    @property
    def cached(self) -> int: ...

    @property
    def pinned(self) -> int: ...

    @property
    def orphaned(self) -> int: ...

    @property
    def reserved_pages(self) -> int: ...

    @property
    def buffers(self) -> int: ...

class PoolEvents:
    @property
    def growths_ready(self) -> int: ...

    @property
    def growths_mapped(self) -> int: ...

    @property
    def pages_recycled(self) -> int: ...

    @property
    def pages_fresh(self) -> int: ...

    @property
    def tensors_reused(self) -> int: ...

    @property
    def tensors_fresh(self) -> int: ...

class PoolOptions:
    def __init__(self, *, budget: int, zero: ZeroPolicy, prefetch: int, cache: int, spare_low: int, spare_high: int, max_age: float, device_reserve: int, patience: float) -> None:
        """Sizes in bytes, times in seconds."""

class PagePool:
    @property
    def page_size(self) -> int: ...

    @property
    def budget_pages(self) -> int: ...

    @property
    def kernel_copies_on_write(self) -> bool: ...

    @property
    def device(self) -> tuple[int, int]: ...

    def counts(self) -> PoolCounts: ...

    def events(self) -> PoolEvents: ...

    def driver_calls(self) -> dict: ...

    def set_budget(self, arg: int, /) -> None: ...

    def prefill(self, arg: int, /) -> None: ...

    def trim(self) -> int: ...

    def wait_idle(self, arg: float, /) -> None: ...

    def retire(self) -> None: ...

    def check_invariants(self) -> None: ...

    def fail_after(self, arg0: int, arg1: int, /) -> None: ...

    def refused_calls(self) -> dict: ...

    def disarm(self) -> None: ...

class ClosedPool:
    def __init__(self, arg: PagePool, /) -> None: ...

    @property
    def page_size(self) -> int: ...

    @property
    def budget_pages(self) -> int: ...

    @property
    def device(self) -> tuple[int, int]: ...

    @property
    def kernel_copies_on_write(self) -> bool: ...

    def counts(self) -> PoolCounts: ...

    def driver_calls(self) -> dict: ...

    def leave_mapper(self) -> None: ...

    def trim(self) -> int: ...

    def wait_idle(self, arg: float, /) -> None: ...

    def events(self) -> PoolEvents: ...

    def check_invariants(self) -> None: ...

def in_forked_child() -> bool: ...

NO_LIMIT: int = 18446744073709551615

CACHE_BY_BUDGET: int = 18446744073709551615

def host_pool(page_size: int, strict_holes: bool, options: PoolOptions) -> PagePool: ...

def cuda_pool(device: int, page_size: int, library: str, memory_is_host_memory: bool, options: PoolOptions) -> PagePool: ...

class PageRecord:
    """The page behind one slot of one row of a VTensor."""

    @property
    def row(self) -> int: ...

    @property
    def index(self) -> int: ...

    @property
    def address(self) -> int: ...

    @property
    def page_id(self) -> int: ...

    @property
    def shared(self) -> int: ...

    @property
    def state(self) -> str: ...

    def __repr__(self) -> str: ...

class TensorCore:
    def __init__(self, pool: PagePool, sizes: Sequence[int], grow_dim: int, capacity: int, dtype: object, device: object, item_size: int, zeroed: bool, move_when_full: bool) -> None: ...

    def attach(self, arg0: object, arg1: int, /) -> None: ...

    def prepare(self, n: object | None) -> None: ...

    def extend(self, tensor: object, n: object | None) -> None: ...

    def append(self, tensor: object, source: object | None) -> None: ...

    def shrink(self, tensor: object, n: object | None, front: object | None, stream: int | None = None) -> None: ...

    def truncate(self, tensor: object, length: object | None, stream: int | None = None) -> None: ...

    def unshare(self, tensor: object, start: object | None, stop: object | None) -> None: ...

    def reindex(self, tensor: object, index: object | None) -> None: ...

    def reserve(self, tensor: object, capacity: object | None) -> None: ...

    def fork(self, tensor: object, stream: int | None = None) -> TensorCore: ...

    def reallocate(self, tensor: object, moved: object, capacity: object | None) -> None: ...

    def alias(self, arg: object, /) -> object: ...

    def close(self, tensor: object, stream: int | None = None) -> None: ...

    def record_stream(self, arg: int, /) -> None: ...

    def pages(self) -> list[PageRecord]: ...

    @property
    def mapped_bytes(self) -> int: ...

    @property
    def mapped_bytes_seen(self) -> int: ...

    @property
    def reserved_bytes(self) -> int: ...

    @property
    def address(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    @property
    def moves_when_full(self) -> bool: ...

    @property
    def grow_dim(self) -> int: ...

    @property
    def dtype(self) -> object: ...

    @property
    def closed(self) -> bool: ...

def reindex(cores: Sequence[TensorCore], tensors: Sequence[object], indices: Sequence[Sequence[int]], states: Sequence[tuple[dict, dict]]) -> None: ...

def use_tensor_classes(*, open: object, copy_on_write: object, closed: object) -> None:
    """
    Sets the classes of a VTensor: open, with shared pages at which a write faults, and closed.
    """

def use_exchange_api(use: bool) -> None:
    """
    For tests: whether to read tensors by DLPack's C exchange API. Without it, as with an older torch, they are read by Python attributes.
    """

class Lease:
    def __init__(self, tensors: object, stream: int | None = None) -> None: ...

    def __enter__(self) -> Lease: ...

    def __exit__(self, *exc: object) -> None: ...

def prepare(tensors: object | None, n: object | None) -> None: ...

class SlotCacheCounts:
    @property
    def pages(self) -> PoolCounts: ...

    @property
    def distinct(self) -> int: ...

    @property
    def shared(self) -> int: ...

    @property
    def lost(self) -> int: ...

    @property
    def swapped_bytes(self) -> int: ...

    @property
    def prefix_units(self) -> int: ...

    @property
    def prefix_evictions(self) -> int: ...

    @property
    def prefix_queries(self) -> int: ...

    @property
    def prefix_hits(self) -> int: ...

class SlotRange:
    pass

class CacheCore:
    def __init__(self, pool: PagePool, slots: int, max_length: int, tile: int, lookahead: int, kinds: Sequence[tuple[Sequence[int], int, int]]) -> None: ...

    def step(self, arg: Sequence[int], /) -> bool: ...

    def fits(self, arg: Sequence[int], /) -> bool: ...

    def alloc(self, expected: int, tokens: bytes | None = None, salt: str = '') -> int: ...

    def free(self, slot: int, stream: int | None = None) -> None: ...

    def truncate(self, slot: int, length: int, stream: int | None = None) -> None: ...

    def fork(self, slot: int, n: int, stream: int | None = None) -> list[int]: ...

    def reorder(self, slots: Sequence[int], sources: Sequence[int], stream: int | None = None) -> list[int]: ...

    def publish(self, arg0: int, arg1: bytes, arg2: str, /) -> int: ...

    def unshare(self, arg0: int, arg1: int, arg2: int, /) -> None: ...

    def begin_write(self, arg0: int, arg1: int, arg2: Sequence[tuple[int, int, int]], /) -> None: ...

    def record_stream(self, stream: int | None = None) -> None: ...

    def swap_out(self, arg: Sequence[int], /) -> None: ...

    def swap_in(self, arg: Sequence[int], /) -> bool: ...

    def wait(self, slot: int, layer: int | None = None) -> None: ...

    def await_arrivals(self, arg: float, /) -> bool: ...

    def begins(self, arg: int, /) -> list[int]: ...

    def storage(self, kind: int, cache: object) -> object: ...

    def row_bytes(self, arg: int, /) -> int: ...

    def length(self, arg: int, /) -> int: ...

    def counts(self) -> SlotCacheCounts: ...

    def pages(self, arg0: int, arg1: int, /) -> list[PageRecord]: ...

    def close(self, stream: int | None = None) -> None: ...

    @property
    def unit(self) -> int: ...

    @property
    def lengths(self) -> list[int]: ...

    @property
    def states(self) -> list[int]: ...

    @property
    def closed(self) -> bool: ...

class AttentionSpec:
    """
    What an attention kernel requires of its arguments.

    All kernels require one device, dtype and head size, equally many positions of K and V, and lengths within them. The
    options add the rest. The methods check everything and raise InvalidArgument.

    In compiled code, heads and head sizes are constants of the graph. Other sizes and strides that the compiler leaves
    open are not checked, nor are the contents of tensors.

    Args:
        operation: the name of the function in messages.
        query, key, value: the names of the three tensors in messages.
        heads_first: they are ``[batch, heads, positions, head size]``, not ``[batch, positions, heads, head size]``.
        packed: they are ``[tokens, heads, head size]`` instead.
        rows: for a kernel of packed sequences: K may also be rows of sequences.
        same_rows: the query must have one sequence for each row of K. Otherwise K may have more rows.
        grouped: the query may have a multiple of K's heads. Otherwise it must have as many.
        lengths: the name of the lengths in messages.
        package: the name of the kernel's package in messages.
        dtypes: the dtypes that the kernel takes. If there are any, head sizes above 256, and addresses and strides that
            are no multiples of 16 bytes, are refused too: FlashAttention refuses these, or copies K and V. Empty means
            any dtype and any strides.
        tile: rows that the kernel reads at once, past the given lengths; 0 if it reads nothing past them.
        tiles_to_the_end: the kernel also reads past the end of the tensors.
    """

    def __init__(self, operation: str, query: str, key: str, value: str, *, heads_first: bool = False, packed: bool = False, rows: bool = False, same_rows: bool = True, grouped: bool = True, lengths: str = 'cache_seqlens', package: str = '', dtypes: tuple = (), tile: int = 0, tiles_to_the_end: bool = False) -> None: ...

    def take(self, query: object | None, key: object | None, value: object | None, lengths: object | None = None, index: object | None = None, leftpad: object | None = None, new_key: object | None = None, new_value: object | None = None) -> tuple:
        """
        Checks the arguments, and returns K and V for the kernel.

        Args:
            query, key, value: plain tensors, VTensors that grow along the positions, or layers of a KVCache. VTensors with
                their positions in another dimension than the kernel's are transposed. The slots of a layer must have all
                positions that the kernel reads or writes.
            lengths: the positions to read, after which the kernel writes: None for all, an int for all rows, or int32
                ``[sequences]``. The host knows only those in a host tensor.
            index: the row of K for each sequence. None means the first rows.
            leftpad: int32 ``[sequences]``: the positions before a sequence's own.
            new_key, new_value: ``[batch, positions, heads, head size]``: what the kernel writes.

        Returns:
            K, V, and the KVCache or None. A VTensor is returned as a plain view, of ``lengths`` positions if that is an int.
            A plain tensor is returned unchanged.

        Raises:
            InvalidArgument: if an argument does not suit. The message names it.
            Closed: if a VTensor or the KVCache is closed.
        """

    def take_packed(self, query: object | None, key: object | None, value: object | None, starts_q: object | None = None, starts_k: object | None = None, used: object | None = None) -> tuple:
        """
        As ``take``, for packed sequences.

        Args:
            starts_q, starts_k: int32 ``[sequences + 1]``: where each sequence begins, and the last ends.
            used: the positions to read if K has rows, like ``lengths`` of ``take``.
        """

    def take_listed(self, query: object | None, key: object | None, value: object | None) -> tuple:
        """
        As ``take``, for a kernel that takes the positions to read of K from a list, such as a table of
        pages. The list is not checked.
        """

    def room(self, query: object | None, key: object | None, value: object | None, lengths: object | None, index: object | None, leftpad: object | None, new_key: object | None, new_value: object | None) -> tuple[int, int, int, int]:
        """
        Checks an append to two VTensors, and returns the lengths that it needs.

        Arguments are as for ``take``.

        Returns:
            The positions that the VTensors hold; those of the shortest and of the longest row, as far as the host knows; and
            the number of positions that the kernel writes after each.
        """

TRACE_KINDS: tuple = ...

class TraceRecording:
    def __init__(self, capacity: int) -> None: ...

    def stop(self) -> None: ...

    def events(self) -> list: ...

    @property
    def dropped(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    @property
    def started(self) -> int: ...
