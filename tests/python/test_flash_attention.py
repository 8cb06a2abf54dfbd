"""The FlashAttention shims, over stand-ins that have the packages' parameters, and their reference on a
CPU."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys

import pytest
import torch
from vtensor.integrations import flash_attention as shims
from vtensor.integrations.full_extent import FullExtent

import attention_support
import fake_flash
import vtensor
from attention_support import HEADS, SIZE, plain_like
from support import on_a_device, run_snippet, same_bytes

PACKAGES = ("fa2", "fa3", "fa4")
GROUPS = 2
CAPACITY = 512

caches = functools.partial(attention_support.caches, dtype=torch.bfloat16)
noise = functools.partial(attention_support.noise, dtype=torch.bfloat16)


@pytest.fixture
def seen(monkeypatch):
    """What the stand-ins record; all three are installed."""
    names = ("flash_attn", "flash_attn_interface", "flash_attn.cute")
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)  # put back at the end
    recorder = fake_flash.install(*PACKAGES)
    yield recorder
    recorder.got.clear()
    shims.look_again()


def exact(q, k, v, length, causal=True):
    """In float64, one row: q [Sq, Hq, D] over the first `length` positions."""
    return fake_flash.attend(q.double(), k.double(), v.double(), length, causal=causal)


# --- what is passed on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("backend", PACKAGES)
def test_the_kernel_gets_the_same_memory_and_every_argument(host, seen, backend, heads_first):
    k, v = caches(host, length=5, heads_first=heads_first)
    q = noise(2, 3, HEADS * GROUPS, SIZE)
    shims.flash_attn_func(q, k, v, causal=True, softmax_scale=0.3, window_size=(2, 0), backend=backend)
    got = seen.got
    assert seen.name == "flash_attn_func" and got["q"] is q
    for name, t in (("k", k), ("v", v)):
        assert type(got[name]) is torch.Tensor and got[name].data_ptr() == t.data_ptr()
        assert got[name].shape == (2, 5, HEADS, SIZE) and got[name].stride(-1) == 1
    assert (got["causal"], got["softmax_scale"], got["window_size"]) == (True, 0.3, (2, 0))


@pytest.mark.parametrize("backend", PACKAGES)
def test_arguments_keep_their_order(host, seen, backend):
    """By position they mean what they mean in the package that is used."""
    k, v = caches(host, length=5)
    q = noise(2, 1, HEADS, SIZE)
    order = {"fa2": (0.0, 0.5, True), "fa3": (0.5, True), "fa4": (0.5, True)}[backend]
    shims.flash_attn_func(q, k, v, *order, backend=backend)
    assert (seen.got["softmax_scale"], seen.got["causal"]) == (0.5, True)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    shims.flash_attn_varlen_func(q[:, 0], k[0], v[0], starts, starts, 1, 2, backend=backend)
    assert seen.got["cu_seqlens_k"] is starts and seen.got["max_seqlen_k"] == 2
    if backend != "fa4":
        new = noise(2, 1, HEADS, SIZE)
        shims.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=5, num_splits=3, backend=backend)
        assert seen.got["k"] is new and seen.got["cache_seqlens"] == 5 and seen.got["num_splits"] == 3


@pytest.mark.parametrize("lengths", [None, 4, [4]])
def test_flash_attention_4_over_a_cache(host, seen, lengths):
    """It has no append, takes no rows beside those of q, and has other names for some options."""
    k, v = caches(host, length=5)
    q, new = noise(1, 1, HEADS * GROUPS, SIZE), noise(1, 1, HEADS, SIZE)
    given = {"window_size": (2, -1), "return_softmax_lse": True, "backend": "fa4"}
    if lengths is not None:
        given |= {"k": new, "v": new}
        given["cache_seqlens"] = lengths if lengths == 4 else torch.tensor(lengths, dtype=torch.int32)
    out, _ = shims.flash_attn_with_kvcache(q, k, v, **given)
    assert out.shape == q.shape and seen.got["window_size"] == (2, None) and seen.got["return_lse"]
    assert seen.got["k"].shape == seen.got["v"].shape == (1, 5, HEADS, SIZE)
    assert lengths is None or same_bytes(k[:1, 4:], new)
    if lengths == [4]:
        assert seen.got["seqused_k"].tolist() == [5]
    assert shims.flash_attn_with_kvcache(q, k, v, cache_seqlens=3, backend="fa4").shape == q.shape
    assert not seen.got["return_lse"] and seen.got["k"].shape[1] == 3


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_soft_cap_by_position_is_one_to_torch_too(host, softcap):
    k, v = caches(host, length=5)
    given = (None, None, None, None, 5, None, None, None, None, True, (-1, -1), softcap)
    with pytest.raises(vtensor.InvalidArgument, match="softcap") if softcap else contextlib.nullcontext():
        shims.flash_attn_with_kvcache(noise(2, 1, HEADS, SIZE), k, v, *given, backend="torch")


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"])
def test_both_tensors_are_leased_while_the_kernel_is_launched(host, seen, leases, name):
    k, v = caches(host, rows=1, length=5)
    seen.before = lambda: leases.append("launch")
    q = on_a_device(noise(1, 1, HEADS, SIZE))
    if name == "flash_attn_varlen_func":
        packed = [vtensor.from_tensor(t[0], grow_dim=0, capacity=64, pool=host) for t in (k, v)]
        k, v, q = *packed, q[0]
    starts = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    arguments = (*starts, 1, 5) if name == "flash_attn_varlen_func" else ()
    getattr(shims, name)(q, k, v, *arguments, backend="fa2")
    assert leases == [[id(k), id(v)], "launch", "ended"]
    leases.clear()
    getattr(shims, name)(q.as_subclass(torch.Tensor), k, v, *arguments, backend="fa2")
    assert leases == ["launch"], "on a CPU the kernel is done when it returns"


# --- which package ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("major", "installed", "used"),
    [
        (8, ("fa2", "fa3", "fa4"), "fa2"),
        (8, ("fa3", "fa4"), "torch"),
        (9, ("fa2", "fa3", "fa4"), "fa3"),
        (9, ("fa2", "fa4"), "fa2"),
        (9, ("fa4",), "fa4"),
        (10, ("fa2", "fa3", "fa4"), "fa4"),
        (10, ("fa2", "fa3"), "fa2"),
        (12, ("fa2", "fa3", "fa4"), "fa2"),
        (10, (), "torch"),
    ],
)
def test_the_package_that_suits_the_device_and_is_installed_is_used(
    seen, monkeypatch, major, installed, used
):
    fake_flash.install(*installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    kernel = shims._find("flash_attn_with_kvcache", None, torch.device("cuda", 0))
    assert kernel.package is shims._PACKAGES[used]
    assert shims._find("flash_attn_func", None, torch.device("cpu")).package.title == "torch"
    assert shims.available() == (*(name for name in PACKAGES if name in installed), "torch")


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("fa2", ["FlashAttention 2", "pip install flash-attn"]),
        ("fa3", ["FlashAttention 3", "flash_attn_interface", "hopper"]),
        ("fa4", ["FlashAttention 4", "pip install flash-attn-4"]),
    ],
)
def test_a_package_that_is_not_there_is_named_with_its_command(seen, backend, says):
    fake_flash.install()
    q = noise(1, 1, HEADS, SIZE)
    with attention_support.refused(*says, error=shims.NotInstalled) as caught:
        shims.flash_attn_func(q, q, q, backend=backend)
    assert isinstance(caught.value, ImportError) and caught.value.__cause__ is not None


def test_a_package_whose_import_fails_is_as_one_that_is_not_there(seen, monkeypatch):
    """As flash-attn-4 beside another nvidia-cutlass-dsl than its own."""
    find = importlib.import_module

    def fails(name):
        if name == "flash_attn.cute":
            raise AttributeError("module 'cutlass' has no attribute 'range'")
        return find(name)

    monkeypatch.setattr(importlib, "import_module", fails)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    shims.look_again()
    assert shims.available() == ("fa2", "fa3", "torch")
    assert shims._find("flash_attn_func", None, torch.device("cuda", 0)).package is shims._PACKAGES["fa2"]
    q = noise(1, 1, HEADS, SIZE)
    with attention_support.refused("'cutlass' has no attribute", error=shims.NotInstalled):
        shims.flash_attn_func(q, q, q, backend="fa4")


# --- growing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("backend", PACKAGES)
def test_an_append_by_the_kernel_grows_both_tensors(host, seen, backend, heads_first):  # I1, I2
    """Bit for bit as over plain tensors of the same strides with room, whose tails are NaN."""
    k, v = caches(host, length=3, heads_first=heads_first)
    plain = [plain_like(t, 64) for t in (k, v)]
    address = k.address
    for step, n in enumerate((1, 1, 40, 1)):
        q, new_k, new_v = (noise(2, n, h, SIZE, seed=9 * step + i) for i, h in enumerate((4, 2, 2)))
        length = k.length
        options = {"cache_seqlens": length, "causal": True, "backend": backend}
        out = shims.flash_attn_with_kvcache(q, k, v, k=new_k, v=new_v, **options)
        assert k.length == v.length == length + n and k.address == address
        # The kernel is not shown what lies behind the last position.
        assert seen.got["k" if backend == "fa4" else "k_cache"].shape[1] == length + n
        exactly = [t[:, : length + n] for t in plain]
        want = shims.flash_attn_with_kvcache(q, *exactly, k=new_k, v=new_v, **options)
        assert torch.equal(out, want)
        ours = k[...].transpose(1, 2) if heads_first else k[...]
        assert torch.equal(ours, plain[0][:, : length + n])


def test_an_int_below_the_length_attends_to_that_many(host, seen):
    k, v = caches(host, length=9)
    k[:, 5:].fill_(float("nan")), v[:, 5:].fill_(float("nan"))
    q = noise(2, 1, HEADS, SIZE)
    for backend in (*PACKAGES, "torch"):
        out = shims.flash_attn_with_kvcache(q, k, v, cache_seqlens=5, backend=backend)
        assert out.isfinite().all() and k.length == 9
        out = shims.flash_attn_with_kvcache(q, k, v, q, q, cache_seqlens=5, backend=backend)
        assert out.isfinite().all() and k.length == 9 and torch.equal(k[:, 5], q[:, 0])
        k[:, 5].fill_(float("nan")), v[:, 5].fill_(float("nan"))


@pytest.mark.parametrize("backend", PACKAGES)
def test_a_kernel_that_raises_leaves_the_lengths(host, seen, backend):  # I8
    k, v = caches(host, length=5)

    def fail():
        raise RuntimeError("refused")

    seen.before = fail
    new = noise(2, 1, HEADS, SIZE)
    with pytest.raises(RuntimeError, match="refused"):
        shims.flash_attn_with_kvcache(new, k, v, k=new, v=new, cache_seqlens=5, backend=backend)
    assert k.length == v.length == 5


def test_no_room_for_v_leaves_k_as_it_was(pool_factory, seen):  # I8, I9
    pool = pool_factory("host", pages=4)
    k, v = caches(pool, rows=1, length=64)  # a page each
    taken = vtensor.empty(4096, grow_dim=0, capacity=4096, dtype=torch.uint8, pool=pool)
    new = noise(1, 1, HEADS, SIZE)
    with pytest.raises(vtensor.OutOfPages):
        shims.flash_attn_with_kvcache(new, k, v, new, new, cache_seqlens=64, backend="fa2")
    assert k.length == v.length == 64
    taken.close()


# --- over-reads ---------------------------------------------------------------------------------------------

# K and V of two rows whose last tile goes over the end of the mapped pages, holes that fault, and NaN where
# something was once; then one step of the stand-in for FlashAttention 3.
OVER_READ = """
import fake_flash
from vtensor.integrations import flash_attention as shims
from vtensor.integrations.full_extent import FullExtent

seen = fake_flash.install("fa3", "fa4")
pool = testing.host_pool(page_size=4096, budget=4096 * 200)
def make():
    t = vtensor.empty(2, 0, 2, 16, grow_dim=1, capacity=1024, dtype=torch.bfloat16, pool=pool)
    full = FullExtent(t)
    t.extend(300).fill_(float("nan"))
    t.truncate(0)
    return t.append(torch.randn(2, 250, 2, 16).bfloat16()), full
(k, full_k), (v, full_v) = make(), make()
lengths = torch.tensor([250, 70], dtype=torch.int32)
q = torch.randn(2, 1, 2, 16).bfloat16()
"""


def test_tiles_behind_the_length_are_mapped_and_finite():
    run_snippet(
        OVER_READ
        + """
for backend in ("fa3", "fa4"):
    out = shims.flash_attn_with_kvcache(q, full_k, full_v, cache_seqlens=lengths, backend=backend)
    name = "k" if backend == "fa4" else "k_cache"
    assert seen.got[name].shape[1] == 1024
    for b, n in enumerate((250, 70)):
        want = fake_flash.attend(q[b].double(), k[b].double(), v[b].double(), n)
        assert out[b].isfinite().all() and (out[b].double() - want.double()).abs().max() < 0.02
    for full, t in ((full_k, k), (full_v, v)):
        assert full.tensor[:, t.length : 250 + 256].count_nonzero() == 0
assert k.length == 250
# Without the tail the VTensor itself is safe too: the kernel's tiles end where the tensor does.
shims.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, backend="fa3")
assert seen.got["k_cache"].shape[1] == 250
"""
    ).check()


def test_without_the_shim_the_same_kernel_dies():
    """So the holes of the test before do fault, and the stand-in does read them."""
    died = run_snippet(
        OVER_READ
        + """
import flash_attn_interface
flash_attn_interface.flash_attn_with_kvcache(q, full_k.tensor, full_v.tensor, cache_seqlens=lengths)
"""
    )
    assert died.code in (-7, -11) and "Fatal Python error" in died.err


@pytest.mark.parametrize("backend", ["fa2", "torch"])
def test_a_full_extent_is_its_tensor_where_no_tile_is_read(host, seen, backend):
    k, v = caches(host, length=7)
    q = noise(2, 1, HEADS, SIZE)
    lengths = torch.tensor([7, 3], dtype=torch.int32)
    out = shims.flash_attn_with_kvcache(
        q, FullExtent(k), FullExtent(v), cache_seqlens=lengths, backend=backend
    )
    if backend == "fa2":  # it plans its work by the tensor's size
        assert seen.got["k_cache"].shape[1] == 7
    assert torch.equal(out, shims.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, backend=backend))


# --- the reference ------------------------------------------------------------------------------------------


def error_beside(out, plain, want):
    """Ours against float64 is no worse than the same call over plain tensors."""
    ours, theirs = ((t.double() - want).abs().max() for t in (out, plain))
    assert ours <= theirs * 1.0001 and theirs < 1e-4, (ours, theirs)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (True, (7, 0)), (False, (3, 2))]
)
@pytest.mark.parametrize("heads_first", [False, True])
def test_the_reference_against_float64(host, queries, causal, window, heads_first):
    k, v = caches(host, length=37, heads_first=heads_first, dtype=torch.float32)
    plain = [plain_like(t, 37) for t in (k, v)]
    q = noise(2, queries, HEADS * GROUPS, SIZE, dtype=torch.float32)
    options = {"causal": causal, "window_size": window}
    out = shims.flash_attn_func(q, k, v, **options)
    want = fake_flash.rows(q.double(), *(t.double() for t in plain), 37, causal=causal, window=window)
    error_beside(out, shims.flash_attn_func(q, *plain, **options), want)


# --- bad input ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def refused(seen, *says):
    """Before anything is launched."""
    seen.name = ""
    with attention_support.refused(*says):
        yield
    assert seen.name == "", "the kernel was launched"


Q = noise(2, 1, HEADS, SIZE)
APPEND = {"k": Q, "v": Q, "cache_seqlens": 5}
TAKES_NOT = ["1 positions are to be appended", "k_cache has 5, v_cache 5"]  # a hole, or before the cache


@pytest.mark.parametrize(
    ("backends", "given", "says"),
    [
        *(
            (["fa2"], APPEND | {"cache_seqlens": lengths}, TAKES_NOT)
            for lengths in (6, -1, torch.tensor([5, 6]), torch.tensor([-1, 5]))
        ),
        *(
            (["torch", "fa4"], {"k": new, "v": new, "cache_seqlens": 5}, ["new positions are"])
            for new in (noise(2, 1, 1, SIZE), noise(1, 1, HEADS, SIZE), noise(2, 1, HEADS))
        ),
        (["torch", "fa4"], {"k": Q}, ["give all three"]),
        (["torch", "fa4"], {"k": Q, "v": Q}, ["give all three"]),
        (["torch"], {"softcap": 30.0}, ["softcap", "flash-attn"]),
        (["torch"], {"alibi_slopes": torch.ones(2)}, ["alibi_slopes", "flash-attn"]),
        (["torch"], {"rotary_cos": torch.ones(2, 8)}, ["rotary_cos", "flash-attn"]),
        (["torch"], {"return_softmax_lse": True}, ["return_softmax_lse", "flash-attn"]),
        (["fa5"], {}, ["'fa5'", "'fa2'"]),
    ],
)
def test_a_call_that_cannot_be(host, seen, backends, given, says):
    k, v = caches(host, length=5)
    for backend in backends:
        with refused(seen, *says):
            shims.flash_attn_with_kvcache(Q, k, v, **given, backend=backend)
        assert k.length == v.length == 5


def test_an_append_to_caches_that_cannot_take_it(host, seen):
    k, v = caches(host, length=5)
    with refused(seen, "written after", "holds 5"):
        shims.flash_attn_with_kvcache(Q, k, v[...], **APPEND, backend="fa2")
    with refused(seen, "k_cache has 5, v_cache 4"):
        shims.flash_attn_with_kvcache(Q, k, v.truncate(4), Q, Q, cache_seqlens=4, backend="fa2")
    rows = [vtensor.from_tensor(noise(2, 5, HEADS, SIZE), 0, 8, pool=host) for _ in "kv"]
    with refused(seen, "grow along them"):
        shims.flash_attn_with_kvcache(Q, *rows, Q, Q, cache_seqlens=2, backend="fa2")
    assert [t.length for t in (k, v, *rows)] == [5, 4, 2, 2]
