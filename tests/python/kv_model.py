"""What ``vtensor.KVCache`` must do, in plain Python: counts of pages and what each token holds.

A page here stands for one page in each range of its kind (all K ranges, or all V ranges), since these never
differ. What may differ from the real cache without harm is decided here in one place each: which free slot
``alloc`` takes (``into=`` names it), and whose parked pages are taken first. The mapper's look-ahead is left
out: it gives up its pages whenever anybody needs them. So are sliding windows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

import vtensor
from vtensor import CapacityExceeded, InvalidArgument, OutOfPages

NoFreeSlot = getattr(vtensor, "NoFreeSlot", None) or type("NoFreeSlot", (vtensor.VTensorError,), {})


@dataclass(eq=False)
class Page:
    """One page in each range of a kind; `refs` slots and prefixes hold it."""

    refs: int = 1


@dataclass
class Kind:
    """Ranges that are alike: K's, or V's."""

    item_bytes: int  # of one token in one range
    ranges: int


@dataclass(eq=False)
class Prefix:
    """One unit of published tokens below its parent's."""

    parent: Prefix | None = None
    key: tuple[int, ...] = ()
    pages: list[list[Page]] = field(default_factory=list)
    contents: object = None
    used_at: int = 0
    children: dict[tuple[int, ...], Prefix] = field(default_factory=dict)


class Contents:
    """What each token of each slot holds: any value, or None where nothing was written."""

    def __init__(self, max_batch: int, max_len: int) -> None:
        self.rows: list[list[object]] = [[] for _ in range(max_batch)]

    def resize(self, slot: int, length: int) -> None:
        row = self.rows[slot]
        del row[length:]
        row.extend([None] * (length - len(row)))

    def save(self, slot: int, start: int, stop: int) -> object:
        return self.rows[slot][start:stop]

    def load(self, slot: int, start: int, saved: object) -> None:
        self.rows[slot][start : start + len(saved)] = saved


class ModelCache:
    """The interface of ``vtensor.KVCache``, with a budget of pages and of host pages to swap into."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_batch: int,
        max_len: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        layer_group: int = 1,
        layout: str = "token",
        value_head_dim: int | None = None,
        tile: int = 1,
        page_size: int = 4096,
        budget: int = 64,
        host_budget: int = 1 << 30,
        contents: type[Contents] = Contents,
    ) -> None:
        heads = num_kv_heads if layout == "token" else 1
        groups = num_layers // layer_group * (num_kv_heads // heads)
        sizes = (head_dim, head_dim if value_head_dim is None else value_head_dim)
        items = [layer_group * heads * n * dtype.itemsize for n in sizes if n]
        self.kinds = [Kind(item, groups * items.count(item)) for item in dict.fromkeys(items)]
        self.max_batch, self.max_len = max_batch, max_len
        self.page_size, self.budget, self.host_budget, self.tile = page_size, budget, host_budget, tile
        self.unit = max(-(-page_size // kind.item_bytes) for kind in self.kinds)
        self.contents = contents(max_batch, max_len)
        self.in_use = [False] * max_batch
        self.swapped: dict[int, object] = {}
        self.siblings: dict[int, tuple[int, list[int]]] = {}  # of a swapped slot: whose first pages it shares
        self._lengths = [0] * max_batch
        self.tables: list[list[list[Page]]] = [[[] for _ in self.kinds] for _ in range(max_batch)]
        self.parked: set[tuple[int, int, int]] = set()  # (slot, kind, index in the table)
        self.tokens: list[list[int]] = [[] for _ in range(max_batch)]  # found in the index, or put there
        self.roots: dict[Hashable, Prefix] = {}
        self.clock = 0
        self.prefix_queries = self.prefix_hits = self.prefix_evictions = 0

    # ------------------------------------------------------------------ counting

    def rows(self, length: int) -> int:
        """Tokens that are mapped for a length: what a kernel reads with the last of them, too."""
        return min(length + self.tile - 1, self.max_len) if length else 0

    def pages_for(self, length: int) -> list[int]:
        """Pages in each range of each kind."""
        return [-(-self.rows(length) * kind.item_bytes // self.page_size) for kind in self.kinds]

    def in_ranges(self, pages: Sequence[int]) -> int:
        """All pages, of those in each range of each kind."""
        return sum(n * kind.ranges for n, kind in zip(pages, self.kinds, strict=True))

    def page_of(self, k: int, position: int) -> int:
        return position * self.kinds[k].item_bytes // self.page_size

    def covered(self, position: int) -> int:
        """Tokens that lie wholly in the whole pages of the first `position` tokens."""
        return min(
            self.page_of(k, position) * self.page_size // kind.item_bytes for k, kind in enumerate(self.kinds)
        )

    def prefixes(self) -> Iterator[Prefix]:
        found = [child for root in self.roots.values() for child in root.children.values()]
        for node in found:
            found.extend(node.children.values())
        return iter(found)

    def distinct(self, tables: list[list[list[Page]]]) -> int:
        """Pages in all ranges behind some tables, those shared counted once."""
        return sum(
            kind.ranges * len({page for table in tables for page in table[k]})
            for k, kind in enumerate(self.kinds)
        )

    @property
    def pages_parked(self) -> int:
        return sum(self.kinds[k].ranges for _, k, _ in self.parked)

    @property
    def pages_used(self) -> int:
        return self.distinct(self.tables + [node.pages for node in self.prefixes()]) + self.pages_parked

    @property
    def host_pages(self) -> int:
        pages = 0
        for slot in self.swapped:
            _, skip = self.siblings.get(slot, (0, [0] * len(self.kinds)))
            pages += self.in_ranges(self.pages_for(self._lengths[slot])) - self.in_ranges(skip)
        return pages

    def stats(self) -> SimpleNamespace:
        live = [slot for slot in range(self.max_batch) if self.in_use[slot] and slot not in self.swapped]
        token_bytes = sum(kind.item_bytes * kind.ranges for kind in self.kinds)
        tokens = sum(self._lengths[slot] for slot in live)
        mapped = sum(
            kind.ranges * len(self.tables[slot][k]) for slot in live for k, kind in enumerate(self.kinds)
        )
        shared = {page for slot in live for table in self.tables[slot] for page in table if page.refs > 1}
        return SimpleNamespace(
            slots_used=sum(self.in_use) - len(self.swapped),
            slots_free=self.max_batch - sum(self.in_use),
            slots_swapped=len(self.swapped),
            tokens=tokens,
            unit=self.unit,
            page_tokens=max(1, self.page_size // max(kind.item_bytes for kind in self.kinds)),
            ranges=sum(kind.ranges for kind in self.kinds),
            nbytes_live=tokens * token_bytes,
            nbytes_mapped=(mapped + self.pages_parked) * self.page_size,
            pages_used=self.pages_used,
            pages_parked=self.pages_parked,
            pages_shared=sum(
                kind.ranges * len(shared & {page for slot in live for page in self.tables[slot][k]})
                for k, kind in enumerate(self.kinds)
            ),
            prefix_tokens=self.unit * sum(1 for _ in self.prefixes()),
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            prefix_evictions=self.prefix_evictions,
            waste=mapped * self.page_size / (tokens * token_bytes) - 1 if tokens else 0.0,
            driver_calls={"caller": {}, "mapper": {}},
        )

    # ------------------------------------------------------------------ room

    def _evictable(self) -> list[Prefix]:
        """Prefixes that no slot uses and that nothing in use stands on, in the order they are given up."""
        waiting = {node: len(node.children) for node in self.prefixes()}
        order: list[Prefix] = []
        while True:
            leaves = [
                node
                for node, children in waiting.items()
                if children == 0 and all(page.refs == 1 for table in node.pages for page in table)
            ]
            if not leaves:
                return order
            node = min(leaves, key=lambda leaf: leaf.used_at)
            del waiting[node]
            order.append(node)
            if node.parent in waiting:
                waiting[node.parent] -= 1

    def _make_room(self, pages: int, keep: set[tuple[int, int, int]]) -> bool:
        """Frees parked pages other than `keep`, then prefixes, until `pages` are free; or changes nothing."""
        short = pages - (self.budget - self.pages_used)
        parked = sorted(self.parked - keep, key=lambda place: (self.in_use[place[0]], place))
        taken = []
        while short > 0 and parked:
            taken.append(parked.pop(0))
            short -= self.kinds[taken[-1][1]].ranges
        evictable = self._evictable() if short > 0 else []
        evicted = []
        while short > 0 and evictable:
            evicted.append(evictable.pop(0))
            short -= self.distinct([evicted[-1].pages])
        if short > 0:
            return False
        self.parked -= set(taken)
        for node in evicted:
            del node.parent.children[node.key]
            self.prefix_evictions += 1
        return True

    def _drop(self, page: Page) -> bool:
        page.refs -= 1
        return page.refs == 0

    def _grow(self, targets: dict[int, tuple[int, int, int]]) -> bool:
        """`targets`: slot -> (first token that is written, first that is not, length to map)."""
        fresh: list[tuple[int, int, int]] = []
        copies: list[tuple[int, int, int]] = []
        refs: dict[Page, int] = {}
        for slot, (start, stop, length) in targets.items():
            for k, (n, kind) in enumerate(zip(self.pages_for(length), self.kinds, strict=True)):
                table = self.tables[slot][k]
                fresh += [(slot, k, i) for i in range(len(table), n)]
                first = start * kind.item_bytes // self.page_size
                last = min(-(-stop * kind.item_bytes // self.page_size), len(table))
                for i in range(first, last):
                    left = refs.setdefault(table[i], table[i].refs)
                    if left > 1:
                        refs[table[i]] = left - 1
                        copies.append((slot, k, i))
        at_hand = self.parked & set(fresh)
        needed = sum(self.kinds[k].ranges for _, k, _ in [*fresh, *copies])
        at_hand_pages = sum(self.kinds[k].ranges for _, k, _ in at_hand)
        if not self._make_room(needed - at_hand_pages, at_hand):
            return False
        self.parked -= at_hand
        for slot, k, _ in fresh:
            self.tables[slot][k].append(Page())
        for slot, k, i in copies:
            self._drop(self.tables[slot][k][i])
            self.tables[slot][k][i] = Page()
        for slot, (_, _, length) in targets.items():
            self.contents.resize(slot, max(length, self._lengths[slot]))
        return True

    # ------------------------------------------------------------------ the four calls

    def _check(self, name: str, slot: int, swapped: bool = False) -> None:
        if not 0 <= slot < self.max_batch or not self.in_use[slot]:
            raise InvalidArgument(f"[KVCache.{name}] slot {slot} is not in use")
        if (slot in self.swapped) != swapped and name != "free":
            raise InvalidArgument(f"[KVCache.{name}] slot {slot} is {'not ' * swapped}swapped out")

    def alloc(
        self,
        tokens: Sequence[int] | None = None,
        *,
        salt: Hashable = "",
        expect: int = 0,
        into: int | None = None,
    ) -> int:
        free = [slot for slot in range(self.max_batch) if not self.in_use[slot]]
        if not free:
            raise NoFreeSlot(f"[KVCache.alloc] all {self.max_batch} slots are in use")
        wanted = self.in_ranges(self.pages_for(expect))
        parked = {slot: sum(self.kinds[k].ranges for s, k, _ in self.parked if s == slot) for slot in free}
        slot = min(free, key=lambda s: abs(parked[s] - wanted)) if into is None else into
        assert not self.in_use[slot]
        self.in_use[slot] = True
        self._lengths[slot] = 0
        self.tokens[slot] = []
        self.contents.resize(slot, 0)
        if tokens is not None:
            self.prefix_queries += len(tokens)
            self._map_prefix(slot, list(tokens), salt)
        return slot

    def _walk(self, tokens: list[int], salt: Hashable) -> list[Prefix]:
        node, path = self.roots.setdefault(salt, Prefix()), []
        self.clock += 1
        for start in range(0, len(tokens) - self.unit + 1, self.unit):
            child = node.children.get(tuple(tokens[start : start + self.unit]))
            if child is None:
                break
            child.used_at = self.clock
            path.append(child)
            node = child
        return path

    def _map_prefix(self, slot: int, tokens: list[int], salt: Hashable) -> None:
        path = self._walk(tokens, salt)[: (len(tokens) - 1) // self.unit]
        covered = self.covered(len(path) * self.unit)
        for i, node in enumerate(path):
            self.contents.resize(slot, (i + 1) * self.unit)
            self.contents.load(slot, i * self.unit, node.contents)
        self.contents.resize(slot, covered)
        for k, pages in enumerate(self.pages_for(covered)):
            found = [page for node in path for page in node.pages[k]][:pages]
            for page in found:
                page.refs += 1
                self.parked.discard((slot, k, len(self.tables[slot][k])))
                self.tables[slot][k].append(page)
        self._lengths[slot] = covered
        self.tokens[slot] = tokens[:covered]
        self.prefix_hits += covered

    def step(self, lengths: Sequence[int]) -> bool:
        lengths = [int(n) for n in lengths]
        if len(lengths) != self.max_batch:
            raise InvalidArgument(f"[KVCache.step] {len(lengths)} lengths for {self.max_batch} slots")
        targets = {}
        for slot, n in enumerate(lengths):
            held = self._lengths[slot]
            if n > self.max_len:
                raise CapacityExceeded(f"[KVCache.step] {n} tokens in slot {slot}, max_len={self.max_len}")
            if not self.in_use[slot] or slot in self.swapped:
                if n not in (0, held * self.in_use[slot]):
                    raise InvalidArgument(f"[KVCache.step] {n} tokens in slot {slot}, free or swapped out")
            elif n < held:
                raise InvalidArgument(f"[KVCache.step] slot {slot} has {held} tokens, {n} were asked")
            elif n > held:
                targets[slot] = (held, n, n)
        if not self._grow(targets):
            return False
        for slot, (_, n, _) in targets.items():
            self._lengths[slot] = n
        return True

    def free(self, slot: int) -> None:
        self._check("free", slot)
        self.swapped.pop(slot, None)
        self.siblings.pop(slot, None)
        self._release(slot, [0] * len(self.kinds), park=True)
        self._lengths[slot] = 0
        self.in_use[slot] = False
        self.contents.resize(slot, 0)

    def _release(self, slot: int, keep: list[int], park: bool) -> None:
        for k, table in enumerate(self.tables[slot]):
            for i in range(keep[k], len(table)):
                if self._drop(table[i]) and park:
                    self.parked.add((slot, k, i))
            del table[keep[k] :]

    def truncate(self, slot: int, length: int) -> None:
        self._check("truncate", slot)
        if not 0 <= length <= self._lengths[slot]:
            raise InvalidArgument(f"[KVCache.truncate] {length} of {self._lengths[slot]} tokens")
        self._release(slot, self.pages_for(length), park=False)
        self._lengths[slot] = length
        del self.tokens[slot][length:]
        self.contents.resize(slot, length)

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    @property
    def lengths(self) -> list[int]:
        return [0 if slot in self.swapped else n for slot, n in enumerate(self._lengths)]

    # ------------------------------------------------------------------ sharing

    def _share(self, slot: int, source: tuple[list[list[Page]], int, object, list[int]]) -> None:
        tables, length, saved, tokens = source
        for k, table in enumerate(tables):
            for page in table:
                page.refs += 1
            self.tables[slot][k] = list(table)
            self.parked -= {(slot, k, i) for i in range(len(table))}
        self._lengths[slot] = length
        self.tokens[slot] = list(tokens)
        self.contents.resize(slot, length)
        self.contents.load(slot, 0, saved)

    def _source(self, slot: int) -> tuple[list[list[Page]], int, object, list[int]]:
        length = self._lengths[slot]
        tables = [list(table) for table in self.tables[slot]]
        return tables, length, self.contents.save(slot, 0, length), self.tokens[slot]

    def fork(self, slot: int, n: int = 1, *, into: Sequence[int] | None = None) -> list[int]:
        self._check("fork", slot)
        free = [s for s in range(self.max_batch) if not self.in_use[s]] if into is None else list(into)
        if len(free) < n:
            raise NoFreeSlot(f"[KVCache.fork] {n} slots, {len(free)} are free")
        for child in free[:n]:
            self.in_use[child] = True
            self._share(child, self._source(slot))
        return free[:n]

    def reorder(self, slots: Sequence[int], sources: Sequence[int]) -> list[int]:
        for slot in [*slots, *sources]:
            self._check("reorder", slot)
        if len(set(slots)) != len(slots) or len(slots) != len(sources) or not set(sources) <= set(slots):
            raise InvalidArgument(f"[KVCache.reorder] slots {slots}, sources {sources}")
        for slot in slots:
            if slot not in sources:
                self.free(slot)
        result: list[int] = []
        for i, source in enumerate(sources):
            result += [source] if source not in sources[:i] else self.fork(source)
        return result

    def publish(self, slot: int, tokens: Sequence[int], *, salt: Hashable = "") -> int:
        self._check("publish", slot)
        tokens = list(tokens)
        known = self.tokens[slot]
        if len(tokens) > self._lengths[slot]:
            raise InvalidArgument(f"[KVCache.publish] {len(tokens)} tokens, slot {slot} has fewer")
        if tokens[: len(known)] != known[: len(tokens)]:
            raise InvalidArgument(f"[KVCache.publish] other tokens than those slot {slot} shares")
        path = self._walk(tokens, salt)
        node = path[-1] if path else self.roots[salt]
        for start in range(len(path) * self.unit, len(tokens) - self.unit + 1, self.unit):
            stop = start + self.unit
            pages = [
                table[self.page_of(k, start) : self.page_of(k, stop)]
                for k, table in enumerate(self.tables[slot])
            ]
            for page in (page for table in pages for page in table):
                page.refs += 1
            key = tuple(tokens[start:stop])
            node.children[key] = node = Prefix(
                node, key, pages, self.contents.save(slot, start, stop), self.clock
            )
            path.append(node)
        published = len(path) * self.unit
        if len(tokens) >= len(known):
            self.tokens[slot] = tokens[: max(published, len(known))]
        return published

    def own(self, slot: int, start: int, stop: int) -> None:
        self._check("own", slot)
        if not 0 <= start <= stop <= self._lengths[slot]:
            raise InvalidArgument(f"[KVCache.own] {start}:{stop} of {self._lengths[slot]} tokens")
        if not self._grow({slot: (start, stop, self._lengths[slot])}):
            raise OutOfPages("[KVCache.own] memory is short")

    # ------------------------------------------------------------------ swapping

    def swap_out(self, slot: int | Sequence[int]) -> None:
        slots = [slot] if isinstance(slot, int) else list(slot)
        for one in slots:
            self._check("swap_out", one)
        if len(set(slots)) != len(slots):
            raise InvalidArgument("[KVCache.swap_out] a slot is named twice")
        skips = [
            self._shared_pages(one, slots[0]) if one != slots[0] else [0] * len(self.kinds) for one in slots
        ]
        for one, skip in zip(slots, skips, strict=True):
            needed = self.in_ranges(self.pages_for(self._lengths[one])) - self.in_ranges(skip)
            if self.host_pages + needed > self.host_budget:
                raise OutOfPages("[KVCache.swap_out] host memory is short")
            self.swapped[one] = self.contents.save(one, 0, self._lengths[one])
            if any(skip):
                self.siblings[one] = (slots[0], skip)
            self.contents.resize(one, 0)
            self._release(one, [0] * len(self.kinds), park=False)

    def _shared_pages(self, slot: int, other: int) -> list[int]:
        """Of each kind, how many first pages of two slots are the same."""
        shared = []
        for mine, theirs in zip(self.tables[slot], self.tables[other], strict=True):
            same = [a is b for a, b in zip(mine, theirs, strict=False)]
            shared.append(same.index(False) if False in same else len(same))
        return shared

    def swap_in(self, slot: int) -> bool:
        self._check("swap_in", slot, swapped=True)
        source, skip = self.siblings.get(slot, (slot, [0] * len(self.kinds)))
        if source != slot:
            self._check("swap_in", source)
        length = self._lengths[slot]
        self.contents.resize(slot, length)
        for k, pages in enumerate(skip):
            self.tables[slot][k] = self.tables[source][k][:pages]
            for page in self.tables[slot][k]:
                page.refs += 1
            self.parked -= {(slot, k, i) for i in range(pages)}
        if not self._grow({slot: (length, length, length)}):
            self.contents.resize(slot, 0)
            self._release(slot, [0] * len(self.kinds), park=False)
            return False
        self.contents.load(slot, 0, self.swapped.pop(slot))
        self.siblings.pop(slot, None)
        return True

    def wait(self, slot: int, layer: int) -> None:
        self._check("wait", slot)

    # ------------------------------------------------------------------ the model's own

    def write(self, slot: int, start: int, values: Sequence[object]) -> None:
        """Writes tokens, as a kernel through ``cache[layer]``: into pages of the slot's own only."""
        self._check("write", slot)
        assert start + len(values) <= self._lengths[slot]
        for k, kind in enumerate(self.kinds):
            first = start * kind.item_bytes // self.page_size
            stop = -(-(start + len(values)) * kind.item_bytes // self.page_size)
            assert all(page.refs == 1 for page in self.tables[slot][k][first:stop]), (
                "a write into shared pages"
            )
        self.contents.load(slot, start, list(values))

    def check(self) -> None:
        """What holds after every call (I4, I5): each reference is counted, and the budget keeps."""
        refs: dict[Page, int] = {}
        for tables in self.tables + [node.pages for node in self.prefixes()]:
            for page in (page for table in tables for page in table):
                refs[page] = refs.get(page, 0) + 1
        assert all(page.refs == n for page, n in refs.items())
        assert 0 <= self.pages_used <= self.budget
        for slot in range(self.max_batch):
            here = self.in_use[slot] and slot not in self.swapped
            expected = self.pages_for(self._lengths[slot]) if here else [0] * len(self.kinds)
            mapped = [len(table) for table in self.tables[slot]]
            # The tile past a prefix that alloc mapped comes with the first step.
            assert mapped == expected or (
                self.tile > 1 and all(m <= n for m, n in zip(mapped, expected, strict=True))
            )
            assert not any(i < mapped[k] for s, k, i in self.parked if s == slot)

    def close(self) -> None:
        self.tables = [[[] for _ in self.kinds] for _ in range(self.max_batch)]
        self.roots.clear()
        self.parked.clear()

    def __enter__(self) -> ModelCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
