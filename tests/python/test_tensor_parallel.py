"""Two gloo ranks under torchrun: each holds its own heads, and an error is raised on both or on none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import vtensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers wants it for tp_plan=")

from vtensor.integrations.tensor_parallel import in_agreement
from vtensor.integrations.transformers import VTensorCache

from tensor_parallel_rank import GREEDY
from tiny_models import SameKernelCache, make_llama, one_thread, prompt, run  # noqa: F401

pytestmark = pytest.mark.slow  # two processes that import torch

RANK = Path(__file__).with_name("tensor_parallel_rank.py")


@pytest.fixture(scope="module")
def llama():
    return make_llama("sdpa", vocab_size=98)  # transformers before 5.21 wants one that the ranks divide


@pytest.fixture(scope="module")
def ranks(llama, tmp_path_factory):
    """What each rank reports of one run."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    llama.save_pretrained(folder / "model")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(RANK), str(folder / "model"), str(folder)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("name", "method"), [("greedy", {}), ("beams", {"num_beams": 3})])
def test_same_tokens_as_one_process_from_local_heads_alone(ranks, llama, name, method):
    expected = run(llama, SameKernelCache(config=llama.config), prompt(2, 50), **GREEDY | method)
    for rank in ranks:
        assert rank[name]["tokens"] == expected.sequences.tolist()
        assert rank[name]["heads"] == [1, 1]  # of two


@pytest.mark.parametrize(("name", "length"), [("short for the prompt", 0), ("short for a step", 64)])
def test_out_of_memory_on_one_rank_raises_on_both(ranks, llama, name, length):
    """I8, I9: no rank has begun the forward, none waits in it, and the next generate() works."""
    expected = run(llama, SameKernelCache(config=llama.config), prompt(1, 60), **GREEDY)
    for rank in ranks:
        result = rank[name]
        assert result["error"] == "OutOfPages"
        assert result["message"].startswith("[in_agreement] on rank 1: [VTensor.extend] need ")
        assert result["seconds"] < 15
        assert result["length"] == length
        assert result["pages"] == (4 if length else 0)  # of one head: K and V of two layers
        assert result["after"]["tokens"] == expected.sequences.tolist()


@pytest.mark.parametrize("name", ["short on both", "short on one", "not made"])
def test_a_smaller_batch_after_a_refused_one(ranks, llama, name):
    """I8: what was made for the refused one is gone on every rank, so that all of them begin alike."""
    expected = run(llama, SameKernelCache(config=llama.config), prompt(2, 30), **GREEDY)
    for rank in ranks:
        result = rank[name]
        assert result["error"] == "OutOfPages" and result["seconds"] < 15
        assert result["length"] == result.get("pages", 0) == 0
        assert result["after"].get("tokens") == expected.sequences.tolist(), result["after"]


def test_any_error_between_two_forwards_ends_both(ranks):
    for rank in ranks:
        assert rank["user error"]["error"] == "InvalidArgument"
        assert "[Stop] enough" in rank["user error"]["message"]
        assert rank["user error"]["seconds"] < 15


def test_waiting_for_a_rank_that_does_not_come_has_an_end(ranks):
    """I12"""
    alone = ranks[1]["alone"]
    assert "did not answer within 2 s" in alone["message"]
    assert alone["seconds"] < 10


def test_without_a_process_group_it_says_how_to_get_one(llama, host):
    with pytest.raises(vtensor.InvalidArgument, match="torchrun"):
        with in_agreement(llama, VTensorCache(llama.config, 64, host)):
            pass
