"""VTensorCache's methods, copies and failures, against DynamicCache's."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import vtensor
from support import page_ids
from vtensor import testing

pytest.importorskip("transformers")

from transformers import DynamicCache
from vtensor.integrations.transformers import VTensorCache, encoder_decoder_cache, install, uninstall

from tiny_models import GREEDY, assert_same_content, filled, one_thread, prompt, run, states  # noqa: F401

# ---------------------------------------------------------------------- the cache's methods


def test_it_is_a_dynamic_cache_of_plain_views(llama, pages):
    cache = VTensorCache(llama.config, 256, pages)
    assert isinstance(cache, DynamicCache) and not cache.is_compileable and cache.is_croppable
    assert cache.get_seq_length() == 0 and cache.get_max_length() == 256
    assert cache.layers[0].keys is None and not cache.is_initialized
    key, value = states(2, 5)
    keys, values = cache.update(key, value, 0)
    assert type(keys) is torch.Tensor and type(values) is torch.Tensor
    assert torch.equal(keys, key) and torch.equal(values, value)
    assert cache.get_seq_length() == 5 and cache.get_mask_sizes(3, 0) == (8, 0)
    assert [k is None for k, _, _ in cache] == [False, True]


def test_early_initialization_maps_nothing(llama, pages):
    cache = VTensorCache(llama.config, 256, pages)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    assert cache.is_initialized and cache.get_seq_length() == 0
    assert pages.stats().pages_mapped == 0
    assert cache.update(*states(2, 3), 0)[0].shape == (2, 2, 3, 16)


def test_crop_gives_pages_back_and_refuses_a_positive_number(llama, pages):
    ours, _ = filled(llama.config, pages)
    before = pages.stats().pages_mapped
    ours.crop(-10)  # from 70 tokens to 60: the second page of each row
    assert pages.stats().pages_mapped == before // 2
    with pytest.raises(ValueError, match="tokens_to_remove=3.*negative"):
        ours.crop(3)
    assert ours.get_seq_length() == 60


def test_reset_gives_all_memory_back_and_takes_other_shapes(llama, pages):
    ours, _ = filled(llama.config, pages)
    owner = ours.layers[0].owners[0]
    ours.reset()
    assert owner.closed and pages.stats().pages_used == 0
    assert ours.get_seq_length() == 0 and not ours.is_initialized
    key, value = states(5, 3)
    keys, _ = ours.update(key.double(), value.double(), 0)
    assert torch.equal(keys, key.double())


def test_a_cache_sleeps_by_its_own_tag(llama, pages):
    """Apart from other tensors of the pool."""
    ours = VTensorCache(llama.config, max_len=256, pool=pages, tag="mine")
    kv = states(1, 9)
    keys, _ = ours.update(*kv, 0)
    kept = keys.clone()
    other = vtensor.zeros(5, grow_dim=0, capacity=9, pool=pages)
    pages.sleep(tag="mine", contents="host")
    assert other.eq(0).all()
    with pytest.raises(vtensor.Asleep):
        ours.update(*kv, 0)
    pages.wake(tag="mine")
    assert torch.equal(keys, kept)
    ours.reset()
    other.close()


@pytest.mark.parametrize("order", [[1, 0, 2], [2, 2, 2], [0, 0, 1], [0, 1, 2]])
def test_reorder_shares_pages_and_parts_them_when_beams_go_on(llama, pages, order):
    ours, theirs = filled(llama.config, pages, batch=3)
    address = ours.layers[0].keys.data_ptr()
    used = pages.stats().pages_used
    for step in range(3):
        for cache in (ours, theirs):
            cache.reorder_cache(torch.tensor(order))
        assert_same_content(ours, theirs)
        assert ours.layers[0].keys.data_ptr() == address  # in place: no view is outside
        assert pages.stats().pages_used <= used  # no page is copied by the reordering itself
        for layer in range(2):
            for cache in (ours, theirs):
                cache.update(*states(3, 2, seed=step), layer)
        used = pages.stats().pages_used
    assert_same_content(ours, theirs)  # I6: each beam has its own tokens
    testing.check_invariants(pages)


def test_reorder_leaves_a_view_outside_as_it_was(llama, pages):
    ours, _ = filled(llama.config, pages, batch=3)
    view = ours.layers[0].keys
    kept = view.clone()
    ours.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(view, kept)  # I3
    assert torch.equal(ours.layers[0].keys, kept[[2, 0, 0]])


def test_batch_operations_before_the_first_token_do_nothing(llama, pages):
    cache = VTensorCache(llama.config, 256, pages)
    cache.reorder_cache(torch.tensor([0, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(-3)
    cache.reset()
    assert cache.get_seq_length() == 0


# ---------------------------------------------------------------------- copies


def test_deepcopy_shares_until_either_side_writes(llama, pages):
    ours, theirs = filled(llama.config, pages)
    used = pages.stats().pages_used
    other = copy.deepcopy(ours)
    assert type(other) is VTensorCache and other.layers[0].owners[0].pool is pages
    assert pages.stats().pages_used == used
    assert page_ids(other.layers[0].owners[0]) == page_ids(ours.layers[0].owners[0])
    other.update(*states(2, 1, seed=7), 0)
    ours.update(*states(2, 1, seed=8), 0)
    other.layers[0].keys[:, :, 0] = 0.0  # I6: a plain write through a view
    theirs.update(*states(2, 1, seed=8), 0)
    assert_same_content(ours, theirs)
    assert torch.equal(other.layers[0].keys[:, :, -1:], states(2, 1, seed=7)[0])
    assert torch.equal(other.layers[0].keys[:, :, 1:70], theirs.layers[0].keys[:, :, 1:70])
    testing.check_invariants(pages)


@pytest.mark.keeps_pages
def test_pickle_and_torch_save_are_dense_and_come_back(llama, pages):
    ours, theirs = filled(llama.config, pages, max_len=8192)
    data = pickle.dumps(ours)
    dense = sum(t.nbytes for layer in theirs.layers for t in (layer.keys, layer.values))
    assert dense < len(data) < 1.2 * dense + 8192
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    for back in (pickle.loads(data), torch.load(buffer, weights_only=False)):
        assert type(back) is VTensorCache and back.max_len == back.get_max_length() == 8192
        assert back.layers[0].owners[0].pool is vtensor.default_pool("cpu")
        assert_same_content(back, theirs)
        back.update(*states(2, 1), 0)
        assert back.get_seq_length() == 71 and ours.get_seq_length() == 70
        back.reset()


# ---------------------------------------------------------------------- failures


def test_max_len_is_named_when_it_is_passed(llama, pages):
    cache = VTensorCache(llama.config, 72, pages)
    with pytest.raises(
        vtensor.CapacityExceeded, match=r"72 tokens and 1 more, but max_len=72.*larger max_len="
    ):
        run(llama, cache, prompt(), **GREEDY)
    assert [layer.get_seq_length() for layer in cache.layers] == [72, 72]


def new_states(*keys, values=None, dtype=torch.float32):
    """An update of a layer of two sequences, with keys of these sizes, and values of their own."""
    return lambda ours, *_: ours.update(torch.zeros(keys), torch.zeros(values or keys, dtype=dtype), 0)


def offloading(ours, llama, pages):
    cache = VTensorCache(llama.config, 128, pages)
    cache.offloading = True  # set later: torch may refuse the stream that its constructor makes
    cache.update(*states(), 0)


POOLS = ("cpu", 3, torch.device("cpu"))
MAKERS = (VTensorCache, encoder_decoder_cache, lambda config, max_len, pool: install(pool))
REFUSED = [
    (new_states(3, 2, 1, 16), "3 sequences for a cache of 2.* reset"),
    (new_states(2, 2, 1, 8, values=(2, 2, 1, 16)), ""),
    (new_states(2, 2, 1, 16, values=(2, 2, 1, 8)), ""),
    (new_states(2, 2, 1, 16, values=(2, 2, 2, 16)), "as many of both"),
    (new_states(2, 2, 1, 16, values=(2, 1, 1, 16), dtype=torch.float64), ""),  # other heads
    (lambda ours, llama, pages: llama(prompt(2), past_key_values=ours), "grad"),
    (lambda ours, *_: setattr(ours.layers[0], "keys", torch.zeros(1)), r"assigned as \[1\]: give \[batch"),
    (
        lambda _, llama, pages: setattr(VTensorCache(llama.config, 9, pages).layers[0], "keys", states()[0]),
        "before the first update.*call update",
    ),
    (lambda _, llama, pages: VTensorCache(llama.config, 9, pages, tag="").update(*states(), 0), "tag"),
    (lambda _, llama, pages: VTensorCache(llama, 128), "pass model.config"),
    (offloading, "the model runs on the host: make the cache without it"),
    *(
        (lambda _, llama, pages, most=most: VTensorCache(llama.config, most), "max_len=")
        for most in (0, -1, 2.5, "128", True)
    ),
    *(
        (
            lambda _, llama, pages, make=make, pool=pool: make(llama.config, 128, pool),
            r"pool=.*pass a vtensor.Pool",
        )
        for make in MAKERS
        for pool in POOLS
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_it_is_refused_in_words_and_changes_nothing(llama, pages, call, words):
    ours, theirs = filled(llama.config, pages)
    with pytest.raises(vtensor.InvalidArgument, match=words):
        call(ours, llama, pages)
    assert_same_content(ours, theirs)
    with pytest.raises(vtensor.InvalidArgument, match="nothing to undo"):
        uninstall()


# ---------------------------------------------------------------------- what DynamicCache allows


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (torch.float32, torch.bfloat16),  # decoding under autocast
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),  # neither holds the other
    ],
)
def test_a_dtype_that_changes(llama, pool_factory, kind, first, then):
    pool = pool_factory(kind, pages=256)
    ours, theirs = VTensorCache(llama.config, 256, pool), DynamicCache(config=llama.config)
    for dtype in (first, then, then, first):
        for layer in range(2):
            new = [x.to(dtype) for x in states(2, 3, seed=layer)]
            given, expected = (cache.update(*new, layer) for cache in (ours, theirs))
            for a, b in zip(given, expected, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)
    assert ours.layers[0].dtype == torch.promote_types(first, then)
    testing.check_invariants(pool)


@pytest.mark.parametrize(
    "kept", [slice(1, None), slice(None, None, 2), [2, 0], [-1], torch.tensor([True, False, True])], ids=str
)
def test_select_by_whatever_indexes_a_tensor(llama, pages, kept):
    ours, theirs = filled(llama.config, pages, batch=3)
    for cache in (ours, theirs):
        cache.batch_select_indices(kept)
    assert_same_content(ours, theirs)


def test_assigned_k_and_v(llama, pool_factory, kind):
    """Shorter, longer, of another batch, a view of what is there; one after the other."""
    ours, theirs = filled(llama.config, pool_factory(kind, pages=256))
    for batch, tokens in ((2, 12), (2, 90), (3, 40)):
        key, value = states(batch, tokens, seed=tokens)
        for cache in (ours, theirs):
            cache.layers[0].keys, cache.layers[0].values = key, value
        assert_same_content(ours, theirs)
    for cache in (ours, theirs):
        layer = cache.layers[0]
        layer.keys, layer.values = layer.keys[1:, :, :30], layer.values[1:, :, :30]
        cache.update(*states(2, 1), 0)
    assert_same_content(ours, theirs)
    key[:] = 0  # a copy was taken
    assert_same_content(ours, theirs)


@pytest.mark.keeps_pages
def test_made_from_states_as_data_parallel_code_does(llama, pages):
    ours, theirs = filled(llama.config, pages)
    for made in (
        type(ours)(iter(theirs), config=llama.config),
        type(ours)([(k, v) for k, v, _ in theirs], config=llama.config, pool=pages),
        type(ours)([(None, None, None), *list(theirs)[1:]], config=llama.config, pool=pages),
    ):
        for a, b in zip(made.layers, theirs.layers, strict=True):
            assert a.keys is None or (torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values))
        assert made.layers[1].get_seq_length() == 70
        made.reset()
    assert type(ours)(config=llama.config, pool=pages).get_seq_length() == 0


def test_offload_gives_pages_back_and_keeps_content_and_address(llama, pool_factory):
    pool = pool_factory("simcuda", pages=512)
    ours, theirs = filled(llama.config, pool)
    addresses = [layer.keys.data_ptr() for layer in ours.layers]
    for layer in ours.layers:
        layer.offload()
        layer.offload()  # a second one is none
    assert pool.stats().pages_mapped == 0 and ours.get_seq_length() == 70
    assert_same_content(ours, theirs)  # I2, read from where it is
    ours.layers[0].prefetch()
    for cache in (ours, theirs):  # layer 1 comes back by itself
        for layer in range(2):
            cache.update(*states(2, 3, seed=layer), layer)
    assert [layer.keys.data_ptr() for layer in ours.layers] == addresses  # I1
    assert_same_content(ours, theirs)
    ours.layers[1].offload()
    copied = copy.deepcopy(ours)
    assert_same_content(copied, theirs)
    testing.check_invariants(pool)


def test_without_max_len_addresses_move_and_nothing_is_copied(llama, pages, monkeypatch):
    monkeypatch.setattr("vtensor.integrations.transformers.layers._FIRST_CAPACITY", 64)
    ours, theirs = filled(llama.config, pages, max_len=None)
    assert ours.get_max_length() == -1
    before = [[record.page_id for record in owner.pages()] for owner in ours.layers[0].owners]
    for step in range(3):
        for cache in (ours, theirs):
            for layer in range(2):
                cache.update(*states(2, 70, seed=step), layer)
    after = [[record.page_id for record in owner.pages()] for owner in ours.layers[0].owners]
    assert all(set(old) <= set(new) for old, new in zip(before, after, strict=True))
    assert_same_content(ours, theirs)
    testing.check_invariants(pages)


@pytest.mark.parametrize("fits", range(1, 32))
def test_update_is_whole_or_not_at_all(llama, pool_factory, fits):
    """I8: whichever of K and V of whichever layer the memory runs out in."""
    pool = pool_factory("host", pages=fits)
    cache = VTensorCache(llama.config, 4096, pool)
    with pytest.raises(vtensor.OutOfPages):
        for layer in range(2):
            cache.update(*states(2, 80), layer)
    assert cache.get_seq_length() == 0 and pool.stats().pages_used == 0
