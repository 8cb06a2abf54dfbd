"""``python -m vtensor demo``: a real text, read and continued with each of Hugging Face's caches and ours."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict

import vtensor

from . import measure
from .model import TEXT, make_llama, read_tokens
from .report import notes, save_picture, table


def main(options: argparse.Namespace) -> int:
    """Runs the demo. Returns the exit status: 0, or 1 if the caches disagree."""
    settings = measure.QUICK if options.quick else measure.FULL
    start = time.perf_counter()
    model = make_llama(settings.layers, settings.vocab_size)
    prompt = read_tokens(settings.prompt - 1, settings.vocab_size)
    pool = vtensor.Pool("cpu", page_size=settings.page_size, prefetch=0)
    if not options.json:
        print(
            f"Reading {settings.prompt - 1:,} tokens of {TEXT.name}, then generating {settings.new}, with a "
            f"Llama of {settings.layers} layers, 32 query heads, 8 KV heads of 64, float32, random weights."
        )
    runs = measure.make_runs(model, settings, pool)
    rows = measure.measure(runs, prompt, settings)
    checked = measure.check(runs, settings)
    failure = checked.failure()
    if options.json:
        figures = {
            "settings": asdict(settings),
            "rows": rows,
            "check": asdict(checked),
            "picture": str(options.picture),
            "failure": failure,
        }
        print(json.dumps(figures))
    else:
        print(f"\n{table(rows)}\n")
        if not failure:
            print(notes(settings, rows, checked))
    save_picture(options.picture, runs, rows, settings)  # last: without a picture the figures stay
    if not options.json:
        print(f"Picture: {options.picture}. All of it took {time.perf_counter() - start:.0f} s.")
    if failure:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failure else 0
