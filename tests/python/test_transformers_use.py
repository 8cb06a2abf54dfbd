"""A cache is for the model of its config, and for one generate() at a time; whatever else is refused before
anything is launched."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch

import vtensor

pytest.importorskip("transformers")

import transformers as hf
from transformers import LlamaConfig
from vtensor.integrations.transformers import VTensorCache, encoder_decoder_cache, installed

from model_zoo import make
from tiny_models import (
    GREEDY,
    SIZES,
    assert_same_content,
    filled,
    make_llama,
    one_thread,  # noqa: F401
    prompt,
    run,
    states,
)

FEW = {"do_sample": False, "max_new_tokens": 4}
PATIENCE = "vtensor.integrations.transformers.callers._RETURNING"


@pytest.fixture
def launched(llama):
    """The forwards that the model has begun."""
    forwards = []
    handle = llama.register_forward_pre_hook(lambda *_: forwards.append(1))
    yield forwards
    handle.remove()


def forward(model, cache, ids):
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)


# ---------------------------------------------------------------------- for one model


def llama_config(**changes):
    return LlamaConfig(**SIZES | changes)


OTHERS = {
    "more layers": (lambda: llama_config(num_hidden_layers=4), "with 4 layers, but the Llama.* has 2 layers"),
    "fewer layers": (
        lambda: llama_config(num_hidden_layers=1),
        "with 1 layers, but the Llama.* has 2 layers",
    ),
    "more heads": (
        lambda: llama_config(num_key_value_heads=4),
        "num_key_value_heads=4 in layer 0, but the Llama.* has num_key_value_heads=2 in layer 0",
    ),
    "fewer heads": (lambda: llama_config(num_key_value_heads=1), "num_key_value_heads=1 in layer 0"),
    "larger heads": (lambda: llama_config(head_dim=32), "head_dim=32 in layer 0, but .* head_dim=16"),
    "a layer of other heads": (
        lambda: llama_config(per_layer_config={1: {"num_key_value_heads": 4}}),
        "num_key_value_heads=4 in layer 1, but .* num_key_value_heads=2 in layer 1",
    ),
    "a window": (
        lambda: llama_config(sliding_window=24),
        "type=sliding_attention in layer 0, but .* type=full_attention",
    ),
    "Mistral": (
        lambda: make("Mistral").config,
        "for a MistralConfig with model_type='mistral', but .*'llama'",
    ),
    "Qwen3": (lambda: make("Qwen3").config, "Qwen3Config"),
    "MLA": (lambda: make("DeepSeek-V3").config, "DeepseekV3Config"),
    "linear attention first": (lambda: make("Qwen3-Next").config, "Qwen3NextConfig"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_cache_made_for_another_model(llama, pages, launched, name):
    config, message = OTHERS[name]
    cache = VTensorCache(config(), 256, pages)
    with pytest.raises(vtensor.InvalidArgument, match=f"{message}.*VTensorCache\\(model.config\\)"):
        run(llama, cache, prompt(), **FEW)
    assert not launched
    with pytest.raises(vtensor.InvalidArgument, match=message):
        forward(llama, cache, prompt())
    assert cache.get_seq_length() == 0 and pages.stats().pages_used == 0


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Mistral", "MiMo-V2", "GPT-2"])
def test_other_models_refuse_a_cache_of_llama(llama, pages, name):
    cache = VTensorCache(llama.config, 256, pages)
    for use in (
        lambda: run(make(name), cache, prompt(), **FEW),
        lambda: forward(make(name), cache, prompt()),
    ):
        with pytest.raises(vtensor.InvalidArgument, match="made for a LlamaConfig"):
            use()
    assert pages.stats().pages_used == 0


@pytest.mark.parametrize("changed", [{"sliding_window": 8}, {"layer_types": ["full_attention"] * 2}])
def test_windows_are_compared(pages, changed):
    model = make("Gemma 3")
    config = copy.deepcopy(model.config)
    for name, value in changed.items():
        setattr(config, name, value)
    with pytest.raises(vtensor.InvalidArgument, match=r"in layer 0, but the Gemma3ForCausalLM"):
        run(model, VTensorCache(config, 256, pages), prompt(), **FEW)


def test_a_cache_that_another_model_has_filled(llama, pages):
    cache, kept = VTensorCache(llama.config, 256, pages), VTensorCache(llama.config, 256, pages)
    begun = run(llama, cache, prompt(), **FEW).sequences
    run(llama, kept, prompt(), **FEW)
    for use in (
        lambda: run(make("Qwen3"), cache, begun, **FEW),
        lambda: forward(make("Qwen3"), cache, begun),
    ):
        with pytest.raises(vtensor.InvalidArgument, match="Qwen3"):
            use()
    assert_same_content(cache, kept)
    run(llama, cache, begun, **FEW)


def test_an_equal_config_is_enough(llama, pages):
    """That of the same model, loaded again, of its body, or that came with a pickled cache."""
    expected = run(llama, VTensorCache(llama.config, 256, pages), prompt(), **FEW).sequences
    for config in (llama_config(vocab_size=200), copy.deepcopy(llama.config), llama.model.config):
        assert torch.equal(run(llama, VTensorCache(config, 256, pages), prompt(), **FEW).sequences, expected)
    cache = VTensorCache(llama.config, 256, pages)
    run(llama, cache, prompt(), **FEW)
    again = copy.deepcopy(llama)
    expected = run(llama, copy.deepcopy(cache), expected, **FEW).sequences
    assert torch.equal(run(again, cache, expected[:, :-4], **FEW).sequences, expected)
    forward(again, cache, prompt(1, 1))
    forward(llama, cache, prompt(1, 1))


@pytest.mark.keeps_pages
def test_a_pickled_cache_knows_its_model(llama):
    cache = VTensorCache(llama.config, 256)
    begun = run(llama, cache, prompt(), **FEW).sequences
    back = pickle.loads(pickle.dumps(cache))
    with pytest.raises(vtensor.InvalidArgument, match="made for a LlamaConfig"):
        run(make("Qwen3"), back, begun, **FEW)
    run(llama, back, begun, **FEW)
    back.reset()


def test_the_config_of_a_whole_or_of_its_text_model(pages):
    sizes = {name: value for name, value in SIZES.items() if not name.endswith("token_id")}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = hf.LlavaConfig(
        text_config=LlamaConfig(**sizes, eos_token_id=None, bos_token_id=None),
        vision_config=hf.CLIPVisionConfig(**vision, image_size=28, patch_size=14),
        image_token_index=96,
    )
    model = hf.LlavaForConditionalGeneration(whole).eval()
    for config in (whole, whole.text_config):
        cache = VTensorCache(config, 256, pages)
        run(model, cache, prompt(), **FEW)
        forward(model, cache, prompt(1, 1))
        forward(model.model.language_model, cache, prompt(1, 1))
    with pytest.raises(vtensor.InvalidArgument, match="head_dim=32"):
        forward(model, VTensorCache(llama_config(head_dim=32), 256, pages), prompt())


def test_layers_past_the_last_one_without_a_model(llama, pages):
    cache = VTensorCache(llama_config(num_hidden_layers=1), 256, pages)
    cache.update(*states(), 0)
    with pytest.raises(vtensor.InvalidArgument, match="layer 1 of a cache with 1 layers.*own config"):
        cache.update(*states(), 1)


# ---------------------------------------------------------------------- of two halves


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_one_cache_for_an_encoder_decoder_model(pages, name):
    model = make(name)
    cache = VTensorCache(model.config, 256, pages)
    with pytest.raises(vtensor.InvalidArgument, match=r"encoder_decoder_cache\(model.config\)"):
        run(model, cache, prompt(), **FEW)
    with (
        pytest.raises(vtensor.InvalidArgument, match=r"encoder_decoder_cache\(model.config\)"),
        torch.no_grad(),
    ):
        model(prompt(), decoder_input_ids=prompt(1, 3), past_key_values=cache)
    assert pages.stats().pages_used == 0


def test_two_halves_for_a_decoder(llama, pages, launched):
    cache = encoder_decoder_cache(make("T5").config, 256, pages)
    with pytest.raises(vtensor.InvalidArgument, match="made for a T5Config .* LlamaForCausalLM"):
        run(llama, cache, prompt(), **FEW)
    assert not launched
    for config in (make("T5").config, llama.config):
        with pytest.raises(vtensor.InvalidArgument, match=r"past_key_values=VTensorCache\(model.config\)"):
            forward(llama, encoder_decoder_cache(config, 256, pages), prompt())
    assert pages.stats().pages_used == 0


def test_two_halves_of_another_model(pages):
    cache = encoder_decoder_cache(make("BART").config, 256, pages)
    with pytest.raises(vtensor.InvalidArgument, match=r"BartConfig.* encoder_decoder_cache\(model.config\)"):
        run(make("T5"), cache, prompt(), **FEW)
    with pytest.raises(vtensor.InvalidArgument, match="made for a BartConfig"), torch.no_grad():
        make("T5")(prompt(), decoder_input_ids=prompt(1, 3), past_key_values=cache)


def test_a_model_may_make_the_half_of_the_encoder_itself(pages):
    """T5Gemma attends to all that the encoder read also in layers with a window."""
    sizes = SIZES | {"sliding_window": 8}
    config = hf.T5GemmaConfig(encoder=sizes, decoder=sizes, vocab_size=97, decoder_start_token_id=2)
    for part in (config, config.encoder, config.decoder):
        part.eos_token_id = None
    model = hf.T5GemmaForConditionalGeneration(config).eval()
    expected = model.generate(prompt(1, 30), **FEW)
    cache = encoder_decoder_cache(config, 256, pages)
    assert torch.equal(run(model, cache, prompt(1, 30), **FEW).sequences, expected)
    assert len({type(layer) for layer in cache.self_attention_cache.layers}) == 2
    assert len({type(layer) for layer in cache.cross_attention_cache.layers}) == 1
    run(model, cache, prompt(1, 30), decoder_input_ids=expected, **FEW)
    with installed(pages):
        assert torch.equal(model.generate(prompt(1, 30), **FEW), expected)
    cache.reset()


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_compiled_halves(pages, name):
    model = make(name)
    cache = encoder_decoder_cache(model.config, 256, pages, compiled=True)
    assert cache.self_attention_cache.compiled and cache.cross_attention_cache.compiled
    expected = model.generate(prompt(2, 40), **GREEDY)
    assert torch.equal(run(model, cache, prompt(2, 40), **GREEDY).sequences, expected)


# ---------------------------------------------------------------------- for one generate() at a time


class Streamer:
    """Calls `act` once, after the prompt and the first token."""

    def __init__(self, act):
        self.act, self.calls = act, 0

    def put(self, value):
        self.calls += 1
        if self.calls == 2:
            self.act()

    def end(self):
        pass


class Paused:
    """A generate() in a thread of its own that stops after the first token until the end of the `with`."""

    def __init__(self, model, cache, ids):
        self.reached, self.go_on, self.sequences = threading.Event(), threading.Event(), None
        self.thread = threading.Thread(target=self._work, args=(model, cache, ids))

    def _work(self, model, cache, ids):
        def pause():
            self.reached.set()
            assert self.go_on.wait(30)

        self.sequences = model.generate(ids, past_key_values=cache, streamer=Streamer(pause), **GREEDY)

    def __enter__(self):
        self.thread.start()
        assert self.reached.wait(30)
        return self

    def __exit__(self, *exception):
        self.go_on.set()
        self.thread.join(30)


def test_a_second_generate_in_another_thread(llama, pages, launched, monkeypatch):
    monkeypatch.setattr(PATIENCE, 0.05)
    cache = VTensorCache(llama.config, 256, pages)
    expected = run(llama, VTensorCache(llama.config, 256, pages), prompt(), **GREEDY).sequences
    with Paused(llama, cache, prompt()) as first:
        before = len(launched)
        with pytest.raises(
            vtensor.InvalidArgument, match=r"a second generate\(\) .* another thread.*deepcopy"
        ):
            run(llama, cache, prompt(1, 90, seed=8), **FEW)
        assert len(launched) == before
        branch = copy.deepcopy(cache)
        run(llama, branch, prompt(1, 90, seed=8), **FEW)  # as the message says
    assert torch.equal(first.sequences, expected)  # the first one's, undisturbed
    run(llama, cache, prompt(1, 100), **FEW)  # it has ended


def test_a_forward_in_another_thread(llama, pages):
    cache = VTensorCache(llama.config, 256, pages)
    with Paused(llama, cache, prompt()):
        with pytest.raises(vtensor.InvalidArgument, match=r"a second forward .* another thread"):
            forward(llama, cache, prompt(1, 1))
    length = cache.get_seq_length()
    forward(llama, cache, prompt(1, 1))  # its thread has ended
    assert cache.get_seq_length() == length + 1


def test_a_second_generate_inside_the_first(llama, pages):
    cache = VTensorCache(llama.config, 256, pages)
    expected = run(llama, VTensorCache(llama.config, 256, pages), prompt(), **GREEDY).sequences
    errors = []

    def nested():
        with pytest.raises(
            vtensor.InvalidArgument, match=r"a second generate\(\) .* in this thread"
        ) as error:
            run(llama, cache, prompt(1, 90), **FEW)
        errors.append(error)
        run(llama, VTensorCache(llama.config, 256, pages), prompt(1, 90), **FEW)  # another cache

    given = llama.generate(prompt(), past_key_values=cache, streamer=Streamer(nested), **GREEDY)
    assert errors and torch.equal(given, expected)


def test_a_second_generate_on_two_halves(pages, monkeypatch):
    monkeypatch.setattr(PATIENCE, 0.05)
    model = make("T5")
    cache = encoder_decoder_cache(model.config, 256, pages)
    with Paused(model, cache, prompt()), pytest.raises(vtensor.InvalidArgument, match="a second generate"):
        run(model, cache, prompt(), **FEW)


def test_one_after_the_other_is_no_second_one(llama, pages):
    """From whichever thread, also after one that failed and whose traceback is kept."""
    cache = VTensorCache(llama.config, 256, pages)

    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:
        llama.generate(prompt(), past_key_values=cache, streamer=Streamer(fail), **GREEDY)
    begun = torch.cat([prompt(), prompt(1, 5, seed=9)], dim=1)
    expected = run(llama, VTensorCache(llama.config, 256, pages), begun, **FEW).sequences
    given = []
    thread = threading.Thread(target=lambda: given.append(run(llama, cache, begun, **FEW).sequences))
    thread.start()
    thread.join(30)
    assert kept.tb is not None and torch.equal(given[0], expected)
    forward(llama, cache, prompt(1, 1))


def test_who_reads_a_stream_to_its_end_may_go_on_at_once(llama, pages):
    """A streamer tells of the end before its generate() has returned."""
    cache = VTensorCache(llama.config, 256, pages)
    ended = threading.Event()

    class Slow(Streamer):
        def end(self):
            ended.set()
            threading.Event().wait(0.1)

    def first():
        llama.generate(prompt(), past_key_values=cache, streamer=Slow(lambda: None), **FEW)

    thread = threading.Thread(target=first)
    thread.start()
    assert ended.wait(30)
    run(llama, cache, prompt(1, 90), **FEW)
    thread.join(30)
    assert cache.get_seq_length() == 93


@pytest.mark.parametrize("early_exit", [1, 2])
def test_a_model_that_is_its_own_assistant(pages, early_exit):
    """With fewer layers, in a generate() and with a cache of its own."""
    model = make_llama("sdpa", num_hidden_layers=3)
    method = GREEDY | {"assistant_early_exit": early_exit}
    expected = model.generate(prompt(), **method)
    assert torch.equal(
        run(model, VTensorCache(model.config, None, pages), prompt(), **method).sequences, expected
    )
    with installed(pages):
        assert torch.equal(model.generate(prompt(), **method), expected)


def test_what_looks_for_a_caller_keeps_nothing_alive(llama, pages):
    """Frames that refer to one another would, until the garbage collector runs."""
    gc.disable()
    try:
        cache = VTensorCache(llama.config, 256, pages)
        forward(llama, cache, prompt())
        run(llama, cache, prompt(1, 90), **FEW)
        assert pages.stats().pages_used > 0
        del cache
        assert pages.stats().pages_used == 0
    finally:
        gc.enable()


def test_marked_by_hand(llama, pages):
    """As code does that generates by itself."""
    ours, _ = filled(llama.config, pages)
    ours._is_user_defined = True
    assert ours._is_user_defined
    ours.update(*states(2, 1), 0)
    ours._is_user_defined = False
    assert not ours._is_user_defined
