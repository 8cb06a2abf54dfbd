"""The layout of a KV cache: the rows of a slot, and the place of each layer's K and V in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from vtensor._base.arguments import MOST, choice, integer, type_text
from vtensor._base.torch_modes import without_modes
from vtensor.errors import CapacityExceeded, InvalidArgument


class Place(NamedTuple):
    """The place of a layer's K or V."""

    row: int  # its first row in the row group
    row_group: int
    offset: int  # bytes into each token's item
    heads: int
    dim: int


class RowContent(NamedTuple):
    """What one row, or neighbouring ones, have of each token."""

    layers: list[int]  # in equal parts of the token's item; the first is the first that reads it
    values: bool  # V
    heads: int  # rows, one of each head; 0: one row of all heads


@dataclass
class RowGroup:
    """Rows with the same bytes per token and the same window, of one band."""

    item_bytes: int  # of one token in one row
    window: int  # tokens; 0 means all
    band: int  # of its layers
    rows: int = 0
    contents: list[RowContent] = field(default_factory=list)  # of the rows, in their order

    def row_of(self, whole: torch.Tensor, slots: int) -> int:
        """Elements of one slot's part of a row, of ``whole``: the range of all rows and slots."""
        return whole.numel() // (self.rows * slots)


@dataclass
class CacheLayout:
    row_groups: list[RowGroup]
    layers: list[tuple[Place, Place | None]]
    bands: list[range]  # their layers
    per_head: bool  # whether each head is a row

    @property
    def ranges(self) -> int:
        """Rows of a slot."""
        return sum(row_group.rows for row_group in self.row_groups)

    def page_tokens(self, page_size: int) -> int:
        """Tokens in a page of the row group with the largest tokens; at least 1."""
        return max(1, page_size // max(row_group.item_bytes for row_group in self.row_groups))

    def views(
        self, ranges: Sequence[torch.Tensor], slots: int, max_len: int, dtype: torch.dtype
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each layer's K and V as strided views of ``ranges``, the whole address range of each row group, as
        bytes. It is divided into equal parts: row ``r`` of slot ``s`` is number ``r * slots + s``."""

        def view(place: Place) -> torch.Tensor:
            row_group = self.row_groups[place.row_group]
            values = ranges[place.row_group].view(dtype)
            slot = row_group.row_of(values, slots)
            token = row_group.item_bytes // dtype.itemsize
            first = place.row * slots * slot + place.offset // dtype.itemsize
            if self.per_head:
                sizes = (slots, place.heads, max_len, place.dim)
                return values.as_strided(sizes, (slot, slots * slot, token, 1), first)
            sizes = (slots, max_len, place.heads, place.dim)
            return values.as_strided(sizes, (slot, token, place.dim, 1), first)

        with without_modes(), torch.no_grad():  # no graph: see tensor.py
            return [(view(k), None if v is None else view(v)) for k, v in self.layers]


def layout_of(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    value_head_dim: int | None,
    layer_group: int,
    layout: str,
    windows: Sequence[int | None] | None,
    bands: int,
    dtype: torch.dtype,
) -> CacheLayout:
    """The layout of a cache. Groups layers of the same window, in order, ``layer_group`` at a time.

    The last group of a window may be smaller. Each of the ``bands`` has neighbouring layers.
    """
    num_kv_heads = size_of("num_kv_heads", num_kv_heads)
    head_dim = size_of("head_dim", head_dim)
    value_dim = head_dim if value_head_dim is None else size_of("value_head_dim", value_head_dim, least=0)
    layer_group = size_of("layer_group", layer_group)
    bands = size_of("bands", bands)
    if layer_group > num_layers:
        raise InvalidArgument(
            f"[KVCache] layer_group is {layer_group}, there are {num_layers} layers: group at most all of "
            "them"
        )
    choice("KVCache", "layout", layout, ("NHD", "HND"))
    if windows is not None and not isinstance(windows, Sequence):
        raise InvalidArgument(
            f"[KVCache] windows is {type_text(type(windows))}: give None or a number for each layer"
        )
    given: Sequence[int | None] = [None] * num_layers if windows is None else windows
    window_of = [0 if w is None else min(integer("KVCache", "a window", w), MOST) for w in given]
    if len(window_of) != num_layers:
        raise InvalidArgument(
            f"[KVCache] windows has {len(window_of)} entries for {num_layers} layers: give one for each"
        )
    for layer, window in enumerate(given):
        if window is not None and window_of[layer] < 1:
            raise InvalidArgument(
                f"[KVCache] the window of layer {layer} is {window}: give None for full attention"
            )
    if not dtype.is_floating_point and dtype not in (torch.int8, torch.uint8):
        raise InvalidArgument(f"[KVCache] dtype is {dtype}: give a floating-point one, or an 8-bit integer")

    item = dtype.itemsize
    if (token := num_layers * num_kv_heads * (head_dim + value_dim) * item) > MOST:
        raise CapacityExceeded(
            f"[KVCache] each token takes {token} bytes, past the address space: ask for less"
        )
    row_groups: dict[tuple[int, int, int], int] = {}
    split = _bands(num_layers, layer_group, bands, len(set(window_of)) > 1)
    result = CacheLayout([], [], split, per_head=layout == "HND")
    places: dict[int, tuple[Place, Place | None]] = {}

    def place(group: list[int], values: bool, window: int) -> list[Place]:
        dim = value_dim if values else head_dim
        width = dim * item * (1 if result.per_head else num_kv_heads)
        band = next(number for number, layers in enumerate(result.bands) if group[0] in layers)
        key = (width * len(group), window, band)
        row_group = row_groups.setdefault(key, len(row_groups))
        if row_group == len(result.row_groups):
            result.row_groups.append(RowGroup(*key))
        row = result.row_groups[row_group].rows
        heads = num_kv_heads if result.per_head else 0
        result.row_groups[row_group].contents.append(RowContent(group, values, heads))
        result.row_groups[row_group].rows += max(1, heads)
        return [Place(row, row_group, i * width, num_kv_heads, dim) for i in range(len(group))]

    for window in dict.fromkeys(window_of):
        alike = [layer for layer in range(num_layers) if window_of[layer] == window]
        for at in range(0, len(alike), layer_group):
            group = alike[at : at + layer_group]
            keys = place(group, False, window)
            values = place(group, True, window) if value_dim else [None] * len(group)
            places.update(zip(group, zip(keys, values, strict=True), strict=True))
    result.layers = [places[layer] for layer in range(num_layers)]
    return result


def size_of(name: str, size: int, least: int = 1) -> int:
    """One of a cache's sizes, within its limits."""
    number = integer("KVCache", name, size, least)
    if number > MOST:
        raise CapacityExceeded(f"[KVCache] {name} is {number}: it must be at most 2**62")
    return number


def _bands(num_layers: int, layer_group: int, bands: int, windows_differ: bool) -> list[range]:
    """The layers of each band, as evenly as their groups allow."""
    if bands > 1 and layer_group > 1 and windows_differ:
        raise InvalidArgument(
            "[KVCache] bands= with layers of several windows needs layer_group=1: layers that share a page "
            "are not neighbours"
        )
    groups = -(-num_layers // layer_group)
    if bands > groups:
        raise InvalidArgument(
            f"[KVCache] bands is {bands}: {num_layers} layers, {layer_group} of which share a page, make at "
            f"most {groups}"
        )
    ends = [min(num_layers, groups * (band + 1) // bands * layer_group) for band in range(bands)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
