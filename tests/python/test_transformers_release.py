"""A release of transformers that is too old is refused in a sentence that names both."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

pytest.importorskip("transformers")

from transformers import GenerationMixin, LlamaForCausalLM
from vtensor.integrations.transformers import release
from vtensor.integrations.transformers.release import CACHE, OLDEST

from support import ROOT, import_beside


def test_it_is_the_one_that_is_declared():
    assert re.findall('"transformers>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text()) == [OLDEST]


def test_models_call_their_cache_so():
    taken = inspect.signature(LlamaForCausalLM.forward).parameters
    assert CACHE in taken and taken.keys().isdisjoint({"cache", "past_key_values"} - {CACHE})


def test_another_name_is_refused(monkeypatch):
    def renamed(self, input_ids, states=None): ...

    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", renamed)
    with pytest.raises(ImportError, match="no argument cache or past_key_values: docs/versions.md"):
        importlib.reload(release)


def test_an_older_one_is_refused(tmp_path):
    older = ["4.57.6", "5.0.0", "5.16.1"]
    said = import_beside("vtensor.integrations.transformers", "transformers", older, tmp_path)
    for installed, sentence in zip(older, said, strict=True):
        assert sentence.startswith("[vtensor.integrations.transformers]")
        assert f"transformers {installed} is installed" in sentence
        assert f"'transformers>={OLDEST}'" in sentence
