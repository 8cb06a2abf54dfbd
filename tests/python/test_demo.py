"""The demo as its users start it."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from vtensor.integrations.demo import measure, model, report
from vtensor.integrations.transformers import VTensorCache

import vtensor
from support import run_process

# One thread: two that wait for each other are slow where the machine is busy.
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.seconds(200)
def test_quick_demo_reports_and_draws(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vtensor", "demo", "--quick", "--json", "--picture", "folder/pages.png"]
    result = run_process(*command, cwd=tmp_path, env=ENVIRONMENT, timeout=180).check()
    report = json.loads(result.out)  # nothing else is on standard output
    rows = {row["cache"]: row for row in report["rows"]}
    assert list(rows) == ["DynamicCache", "StaticCache", "preallocated", "VTensorCache"]

    assert report["failure"] is None and report["check"]["same_tokens"]
    assert report["check"]["largest_difference"]["VTensorCache"] == 0.0
    assert report["check"]["distinct_tokens"] > 12

    settings = measure.QUICK
    token, layers = 2 * settings.layers * 8 * 64 * 4, settings.layers
    grown = [128, 256, *range(settings.prompt, settings.final_length)]  # lengths that torch.cat copied
    assert rows["DynamicCache"]["bytes_copied_for_growth"] == token * sum(grown)
    for cache in ("StaticCache", "preallocated", "VTensorCache"):
        assert rows[cache]["bytes_copied_for_growth"] == 0
    page_tokens = settings.page_size // (64 * 4)
    pages = 2 * layers * 8 * -(-settings.final_length // page_tokens)
    assert rows["VTensorCache"]["kv_mapped"] == rows["VTensorCache"]["kv_peak"] == pages * settings.page_size
    assert (
        rows["DynamicCache"]["kv_peak"] > rows["DynamicCache"]["kv_mapped"] == settings.final_length * token
    )
    assert all(row["kv_needed"] == settings.final_length * token for row in rows.values())
    assert all(row["decode_tokens_per_second"] > 0 and row["prefill_seconds"] > 0 for row in rows.values())

    picture = (tmp_path / "folder" / "pages.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">II", picture[16:24]) > (1000, 600)
    assert "generating" in result.err  # progress


def test_a_picture_that_cannot_be_written(monkeypatch) -> None:
    """As in a folder without permission, where the figures are printed all the same."""
    for part in ("_draw_pages", "_draw_memory", "_draw_memory_of_generation"):
        monkeypatch.setattr(report, part, lambda *arguments: None)
    runs, rows = [SimpleNamespace(name=measure.OURS)], [{"kv_needed": 1}]
    with pytest.raises(vtensor.VTensorError, match=r"^\[demo\] no picture \(.*\): name another file"):
        report.save_picture(Path("/proc/pages.png"), runs, rows, measure.QUICK)


def test_the_full_demo_reads_8000_tokens_of_a_real_text() -> None:
    settings = measure.FULL
    assert settings.prompt - 1 >= 8000 and settings.new == 128
    tokens = model.read_tokens(settings.prompt - 1, settings.vocab_size)
    assert tokens.shape == (1, settings.prompt - 1) and tokens.max() < settings.vocab_size
    assert tokens.unique().numel() > 2000
    with pytest.raises(ValueError, match="ask for fewer"):
        model.read_tokens(10**6, settings.vocab_size)


def test_mapped_kv_is_at_most_2_percent_above_need_at_8k() -> None:
    settings = measure.FULL
    pool = vtensor.Pool("cpu", page_size=settings.page_size, prefetch=0)
    config = model.make_llama(settings.layers, settings.vocab_size).config
    cache = VTensorCache(config, settings.max_len, pool)
    read, token = torch.zeros(1, 8, settings.prompt, 64), torch.zeros(1, 8, 1, 64)
    cache.update(read, read, 0)
    for length in range(settings.prompt, settings.final_length + 1):
        needed = 2 * 8 * length * 64 * 4
        assert needed <= pool.stats().nbytes_mapped <= 1.02 * needed
        cache.update(token, token, 0)
    cache.reset()
    pool.close()
