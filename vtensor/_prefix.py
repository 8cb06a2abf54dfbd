"""What requests computed, kept for those that begin with the same tokens.

A radix tree over token ids whose edges are all one unit long: the tokens that fill a page (SGLang's
RadixAttention, arXiv 2312.07104, has the tree; vTensor, arXiv 2407.15309, the pages mapped again)."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import torch

from vtensor import _core
from vtensor.errors import InvalidArgument

__all__ = ["PrefixIndex", "token_ids"]

_WIDTH = array("q").itemsize


class _Node:
    __slots__ = ("children", "edge", "kept", "parent")

    def __init__(self, parent: _Node | None, edge: bytes, kept: _core.KeptPrefix | None) -> None:
        self.parent = parent
        self.edge = edge
        self.kept = kept
        self.children: dict[bytes, _Node] = {}


class PrefixIndex:
    """Args:
    unit: tokens of one edge.
    """

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.evictions = 0
        self._roots: dict[str, _Node] = {}
        self._recent: OrderedDict[_Node, None] = (
            OrderedDict()
        )  # least recently used first, leaves before parents

    def __len__(self) -> int:
        return len(self._recent)

    def find(self, tokens: Sequence[int], salt: str) -> list[_core.KeptPrefix]:
        """The pages of the longest known beginning of ``tokens``, unit after unit."""
        found = list(self._walk(_ids(tokens), salt))
        self._touch(found[-1] if found else None)
        return [node.kept for node in found if node.kept is not None]

    def add(
        self,
        tokens: Sequence[int],
        salt: str,
        offer: Callable[[int, int], list[_core.KeptPrefix]],
    ) -> int:
        """Adds the whole units of ``tokens``; ``offer(first, last)`` gives the pages of units that are new.
        Returns the units that are in the index."""
        ids = _ids(tokens)
        path = list(self._walk(ids, salt))
        units = len(tokens) // self.unit
        if units > len(path):
            kept = offer(len(path), units)
            node = path[-1] if path else self._roots.setdefault(salt, _Node(None, b"", None))
            for edge, pages in zip(self._edges(ids, len(path)), kept, strict=False):
                child = _Node(node, edge, pages)
                node.children[edge] = child
                self._recent[child] = None
                node = child
            path.append(node)
        self._touch(path[-1] if path else None)
        return units

    def evict(self, pages: int) -> int:
        """Gives up the least recently used units that nobody uses, until ``pages`` pages are free or there
        are no more. Returns the pages."""
        freed = 0
        going: dict[_Node, None] = {}
        for node in self._recent:
            if freed >= pages:
                break
            if (
                node.kept is None
                or node.kept.in_use
                or any(child not in going for child in node.children.values())
            ):
                continue
            freed += node.kept.pages
            going[node] = None
        for node in going:
            self._forget(node)
        return freed

    def clear(self) -> None:
        """Gives everything up; what slots have mapped stays theirs."""
        for node in self._recent:
            node.kept = None  # now: parents and children hold one another
        self._roots.clear()
        self._recent.clear()

    def _walk(self, ids: bytes, salt: str) -> Iterator[_Node]:
        node = self._roots.get(salt)
        if node is None:
            return
        for edge in self._edges(ids, 0):
            node = node.children.get(edge)
            if node is None:
                return
            yield node

    def _edges(self, ids: bytes, first: int) -> Iterator[bytes]:
        width = self.unit * _WIDTH
        for at in range(first * width, len(ids) - width + 1, width):
            yield ids[at : at + width]

    def _touch(self, node: _Node | None) -> None:
        while node is not None and node.parent is not None:
            self._recent.move_to_end(node)
            node = node.parent

    def _forget(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge]
        del self._recent[node]
        node.kept = None
        self.evictions += 1


def token_ids(operation: str, tokens: Sequence[int] | torch.Tensor) -> Sequence[int]:
    """Ids as a sequence.

    Raises:
        InvalidArgument: a tensor of other things, or of several requests.
    """
    if isinstance(tokens, torch.Tensor):
        if tokens.dim() != 1 or tokens.is_floating_point():
            raise InvalidArgument(
                f"[{operation}] tokens is a {tokens.dtype} tensor of shape {tuple(tokens.shape)}: give the "
                "ids of one request, [n]"
            )
        return list(tokens.tolist())
    return tokens


def _ids(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
