"""What FlashAttention's shims see at a glance, in C++, is what their checks in Python find: the same call of
the kernel, or the same refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from vtensor.integrations import flash_attention as flash
from vtensor.integrations.sdpa import scaled_dot_product_attention

import vtensor
from support import on_a_device
from vtensor.demands import Demands, Unknown
from vtensor.kv_rows import rows_of

ROWS, HOLDS, ROOM, HEADS, SIZE = 3, 7, 12, 2, 16
TOKENS = [HOLDS, 0, 4]  # of a cache's slots


class Kernel:
    """Of either kind; notes what it is given."""

    def __init__(self, operation: str, reads_tiles: bool) -> None:
        self.got: list[object] = []
        rank, heads_dim = (3, 1) if operation == "flash_attn_varlen_func" else (4, 2)
        package = replace(flash._PACKAGES["fa2"], reads_tiles=reads_tiles)
        parameters = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
        demands = Demands(
            rank,
            heads_dim,
            same_rows=operation == "flash_attn_func",
            aligned=True,
            reads_tiles=reads_tiles,
        )
        self.at_a_glance = flash._Kernel(
            operation, operation, package, self.note, dict.fromkeys(parameters), True, demands
        )
        self.looked_into = replace(self.at_a_glance, demands=Unknown())

    def note(self, q, keys, values, *args, **kwargs):
        for t in (keys, values):
            self.got += [type(t), t.data_ptr(), t.shape, t.stride()]
        self.got += [id(q), *map(id, args), *((name, id(value)) for name, value in kwargs.items())]


@pytest.fixture(scope="module")
def sides():
    """K and V of every kind ``[rows, positions, heads, head size]``, by name, of one length or of others."""
    with vtensor.Pool("cpu", budget=1 << 24, page_size=4096) as pool:

        def grown(*sizes, grow_dim=1, dtype=torch.bfloat16):
            return vtensor.from_tensor(noise(*sizes, dtype=dtype), grow_dim=grow_dim, capacity=32, pool=pool)

        def cache(**options):
            made = vtensor.KVCache(1, HEADS, SIZE, ROWS, ROOM, pool=pool, **options)
            for _ in TOKENS:
                made.alloc()
            assert made.step(TOKENS)
            return made

        caches = [cache(), cache(layout="head"), cache(tile=ROOM)]
        closed = cache()
        both = {
            "plain": [noise(ROWS, HOLDS, HEADS, SIZE) for _ in "kv"],
            "grown": [grown(ROWS, HOLDS, HEADS, SIZE) for _ in "kv"],
            "longer": [grown(ROWS, HOLDS + 1, HEADS, SIZE) for _ in "kv"],
            "float": [grown(ROWS, HOLDS, HEADS, SIZE, dtype=torch.float32) for _ in "kv"],
            "heads first": [grown(ROWS, HEADS, HOLDS, SIZE, grow_dim=2) for _ in "kv"],
            "cached": list(caches[0][0]),
            "cached tiles": list(caches[2][0]),
            "cached by heads": [t.transpose(1, 2) for t in caches[1][0]],
            "some slots": [t[::2, :5] for t in caches[0][0]],
            "some tokens": [t[:1, 2:6] for t in caches[0][0]],
            "every second token": [t[:1, 1:7:2] for t in caches[0][0]],
            "no token": [t[:, 3:3] for t in caches[0][0]],
            "of a closed cache": list(closed[0]),
        }
        tokens = {
            "plain": [noise(HOLDS, HEADS, SIZE) for _ in "kv"],
            "grown": [grown(HOLDS, HEADS, SIZE, grow_dim=0) for _ in "kv"],
            "rows": both["grown"],
            "a row": [t[0] for t in both["grown"]],
            "a slot": [t[2] for t in caches[0][0]],
            "part of a slot": [t[0, 1:6] for t in caches[0][0]],
            "tokens of all slots": [t[:, 0] for t in caches[0][0]],
        }
        closed.close()
        yield both, tokens
        for made in caches:
            made.close()


def noise(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype)


WRONG = (
    "heads",
    "count",
    "numbers",
    "wide numbers",
    "new",
    "new dtype",
    "one new",
    "index",
    "table",
    "other",
)
POSITIONS = (
    "plain", "grown", "longer", "float", "heads first", "cached", "cached tiles", "cached by heads",
    "some slots", "some tokens", "every second token", "no token", "of a closed cache",
)  # fmt: skip
PACKED = ("plain", "grown", "rows", "a row", "a slot", "part of a slot", "tokens of all slots")


@st.composite
def calls(draw: st.DrawFn, operation: str):
    """The names of K and V, and the other arguments of a call, of which one may be wrong."""
    wrong = draw(st.sampled_from([*WRONG, *[""] * len(WRONG)]))
    packed = operation == "flash_attn_varlen_func"
    kind = draw(st.sampled_from(PACKED if packed else POSITIONS))
    other = draw(st.sampled_from(PACKED if packed else POSITIONS)) if wrong == "other" else kind
    heads = 1 if wrong == "heads" else draw(st.sampled_from([HEADS, 2 * HEADS]))

    def told(count: int, ascending: bool = False, name: str = "numbers") -> torch.Tensor:
        few = st.integers(-1, HOLDS + 1) if wrong == name else st.integers(0, HOLDS)
        found = draw(st.lists(few, min_size=count, max_size=count))
        lengths = torch.tensor(sorted(found) if ascending else found)
        lengths = lengths if wrong == "wide numbers" else lengths.int()
        return on_a_device(lengths) if draw(st.integers(0, 5)) == 0 else lengths

    if packed:
        named = ("query's numbers", "numbers")
        starts = [told(draw(st.integers(0, 3)), ascending=True, name=name) for name in named]
        return (kind, other), noise(HOLDS, heads, SIZE), (*starts, 1, 1), {}
    batch = draw(st.sampled_from([0, 1, 2, ROWS, ROWS, ROWS, ROWS + 1]))
    q = noise(batch, draw(st.integers(1, 2)), heads, SIZE)
    if operation == "flash_attn_func":
        return (kind, other), q, (), {}
    given = {}
    count = batch + 1 if wrong == "count" else batch
    lengths = draw(st.sampled_from(["none", "int", "each", "int", "each"]))
    if lengths == "int":
        at = st.sampled_from([-1, HOLDS + 1, 1 << 70]) if wrong == "numbers" else st.integers(0, HOLDS)
        given["cache_seqlens"] = draw(at)
    elif lengths == "each":
        given["cache_seqlens"] = told(count)
    if draw(st.booleans()):
        of_new = [draw(st.sampled_from([batch, count])), draw(st.integers(0, 2)), HEADS, SIZE]
        given["k"], given["v"] = noise(*of_new), noise(*of_new)
        if wrong == "new":
            of_new[draw(st.integers(1, 3))] += 1
            given.update({name: noise(*of_new) for name in draw(st.sampled_from(["k", "v", "kv"]))})
        elif wrong == "new dtype":
            given["k"] = given["k"].float()
        elif wrong == "one new":
            del given[draw(st.sampled_from(["k", "v"]))]
    if wrong == "index":
        given["cache_batch_idx"] = torch.zeros(batch, dtype=torch.int32)
    elif wrong == "table":
        given["block_table"] = draw(st.sampled_from([None, noise(1)]))
    return (kind, other), q, (), given


@pytest.mark.parametrize(
    "operation", ["flash_attn_func", "flash_attn_varlen_func", *["flash_attn_with_kvcache"] * 3]
)
@given(data=st.data(), reads_tiles=st.booleans(), on_device=st.booleans())
@settings(max_examples=1500, deadline=None)
def test_a_glance_sees_what_a_closer_look_sees(sides, operation, data, reads_tiles, on_device):
    kinds, q, args, kwargs = data.draw(calls(operation))
    q = on_a_device(q) if on_device else q
    of = sides[operation == "flash_attn_varlen_func"]
    k, v = of[kinds[0]][0], of[kinds[1]][1]
    held = [t.length if isinstance(t, vtensor.VTensor) else 0 for t in (k, v)]
    kernel = Kernel(operation, reads_tiles)
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vtensor.KVCache, "record_stream", lambda cache: kernel.got.append(id(cache)))
        for look in (kernel.at_a_glance, kernel.looked_into):
            patch.setattr(flash, "_kernel", lambda *given, look=look: look)
            kernel.got.clear()
            try:
                getattr(flash, operation)(q, k, v, *args, **kwargs)
                found = [*kernel.got]
            except (vtensor.VTensorError, OverflowError) as error:
                assert not kernel.got
                found = [type(error), str(error)]
            event("refused" if len(found) == 2 else "called")
            for t, length in zip((k, v), held, strict=True):
                if isinstance(t, vtensor.VTensor):
                    found.append(t.length)
                    t.truncate(length)
            outcomes.append(found)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("kind", "lengths", "appends"),
    [
        ("grown", None, False), ("grown", 3, False), ("grown", "each", False), ("grown", 7, True),
        ("grown", "each", True), ("plain", 3, False), ("plain", "each", True), ("cached", "each", False),
        ("cached", "each", True), ("cached by heads", "each", False), ("cached tiles", 0, False),
    ],
)  # fmt: skip
def test_what_serving_asks_is_seen_at_a_glance(sides, kind, lengths, appends):
    """Of these nothing is left to Python."""
    k, v = sides[0][kind]
    demands = Demands(4, 2, same_rows=False, aligned=True)
    has = torch.tensor(TOKENS, dtype=torch.int32) - (torch.tensor([1, 0, 1]).int() if appends else 0)
    q, told = noise(ROWS, 1, 4, SIZE), has if lengths == "each" else lengths
    if kind.startswith("cached"):  # slot 1 has no token to spare
        q, told, k, v = q[::2], has[::2].clone() if lengths == "each" else told, k[::2], v[::2]
    new = [noise(len(q), 1, HEADS, SIZE) for _ in "kv"] if appends else [None, None]
    if appends and kind == "grown":
        assert demands.plain(q, k, v, told, None, *new) is None  # they are to grow first
        longest = HOLDS if lengths == HOLDS else HOLDS - 1
        assert demands.room(q, k, v, told, *new) == (HOLDS, 0 if lengths == "each" else HOLDS, longest, 1)
        return
    keys, values, cache = demands.plain(q, k, v, told, None, *new)
    shown = 3 if (kind, lengths) == ("grown", 3) else k.shape[1]
    assert keys.shape[1] == values.shape[1] == shown
    assert (cache is not None) == kind.startswith("cached")
    if kind != "grown":
        assert keys is k and values is v


@pytest.mark.parametrize("kind", ["grown", "plain", "cached"])
def test_what_only_a_device_knows_is_left_to_it(sides, kind):
    k, v = sides[0][kind]
    demands = Demands(4, 2, same_rows=False, aligned=True)
    q, new = noise(ROWS, 1, 4, SIZE), noise(ROWS, 1, HEADS, SIZE)
    past = on_a_device(torch.full((ROWS,), ROOM + 1, dtype=torch.int32))
    assert demands.plain(q, k, v, past) is not None and demands.plain(q, k, v, past[:2]) is None
    if kind == "grown":
        assert demands.room(q, k, v, past, new, new) == (HOLDS, 0, HOLDS, 1)


def test_either_may_be_of_a_cache(sides):
    """Which is then told of the stream."""
    k, v = sides[0]["cached"]
    other, q, demands = torch.zeros_like(k), noise(ROWS, 1, 4, SIZE), Demands(4, 2)
    cache = demands.plain(q, k, v, 0)[2]
    assert isinstance(cache, vtensor.KVCache)
    assert demands.plain(q, other, v, 0)[2] is demands.plain(q, k, other, 0)[2] is cache
    assert demands.plain(q, other, other, 0)[2] is None


def test_tensors_without_memory_tell_nothing(sides):
    """As those that a tracer makes: what is in them is not looked at."""
    k, v = sides[0]["plain"]
    q, lengths = noise(ROWS, 1, 4, SIZE), torch.ones(ROWS, dtype=torch.int32)
    lengths.untyped_storage().resize_(0)
    assert Demands(4, 2, same_rows=False).plain(q, k, v, lengths) is None
    assert Demands(3, 1, same_rows=False).plain(q[0], k[0], v[0], lengths) is None
    assert Demands(3, 1, same_rows=False).plain(q[0], k[0], v[0], None, lengths) is None


def test_a_cache_that_is_gone_but_for_its_core(host):
    """A thread may be inside one of its operations: it is as closed for the glance as for the closer look."""
    cache = vtensor.KVCache(1, HEADS, SIZE, ROWS, 4, pool=host)
    kept, (k, v) = cache._core, cache[0]
    q = noise(ROWS, 1, 4, SIZE)
    assert Demands(4, 2).plain(q, k, v, 0) is not None
    del cache
    assert Demands(4, 2).plain(q, k, v, 0) is None
    with pytest.raises(vtensor.Closed):
        rows_of(k, 1)
    kept.close()


def test_sdpa_over_a_cache_at_a_glance(sides):
    k, v = (t.transpose(1, 2) for t in sides[0]["some slots"])
    q = noise(2, HEADS, 1, SIZE)
    assert Demands(4, 1).plain(q, k[..., :4, :], v[..., :4, :])[2] is not None
    with pytest.raises(vtensor.InvalidArgument, match="5 tokens of slot 2"):
        scaled_dot_product_attention(q, k, v)
