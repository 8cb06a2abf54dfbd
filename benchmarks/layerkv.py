"""A recorded trace at rising rates, first come first served and by LayerKV, in the same memory: times to the
first token, times per token and broken promises. ``python benchmarks/layerkv.py TRACE`` runs it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vtensor.replay import (
    PREDICTORS,
    Result,
    Row,
    Server,
    default_layer_group,
    model_shape,
    open_cache,
    parse_bytes,
    read_trace,
    replay,
)

MODEL, PAGE = "llama-3-8b", 2 << 20
WAYS = {  # policy and predictor, color and style of its line
    "paged": ("paged", "histogram", "#e0a33e", "-"),
    "static": ("static", "histogram", "#d9647a", "-"),
    "first come": ("vtensor", "histogram", "#1b9aaa", "-"),
    "whole prompts": ("whole", "histogram", "#7a5c99", "-"),
    "LayerKV": ("layerkv", "histogram", "#2b4c7e", "-"),
    "LayerKV, truth": ("layerkv", "truth", "#2b4c7e", "--"),
    "LayerKV, bad predictor": ("layerkv", "bad", "#2b4c7e", ":"),
}


def serve(rows: list[Row], memory: int, way: str, speed: float, slo_tpot: float, bands: int) -> Result:
    policy, predictor, _, _ = WAYS[way]
    shape = model_shape(MODEL)
    server = Server(
        shape=shape,
        memory=memory,
        max_batch=256,
        max_len=max(row.prompt_tokens + row.output_tokens for row in rows),
        page_size=PAGE,
        layer_group=default_layer_group(shape, PAGE),
        lookahead=32,
        bands=bands,
    )
    with open_cache(policy, server) as cache:
        return replay(
            policy,
            cache,
            rows,
            token_bytes=shape.token_bytes,
            speed=speed,
            slo_tpot=slo_tpot,
            predictor=PREDICTORS[predictor](),
        )


def picture(figures: dict[str, list[dict[str, float]]], path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    axes = figure.subplots(1, 3)
    for way, points in figures.items():
        _, _, color, style = WAYS[way]
        speeds = [point["speed"] for point in points]
        for axis, key, scale in zip(axes, ("ttft_p99", "tpot_mean", "broken"), (1, 1e3, 100), strict=True):
            values = [point[key] * scale for point in points]
            axis.plot(speeds, values, label=way, color=color, linestyle=style, marker=".")
    axes[0].set(title="time to first token, 99th percentile (s)", yscale="log")
    axes[1].set(title="time per later token, mean (ms)", yscale="log")
    axes[2].set(title="broken promises (%)", ylim=(0, 100))
    axes[0].legend(frameon=False, fontsize=8)
    for axis in axes:
        axis.set_xlabel("requests come so many times as fast as recorded")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.suptitle(title, fontweight="bold")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--memory", default="10GiB")
    parser.add_argument("--limit", type=int, default=3000)
    parser.add_argument("--speeds", default="0.7,0.75,0.8,0.85,0.9")
    parser.add_argument("--slo-tpot", type=float, default=0.2)
    parser.add_argument("--bands", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = read_trace(options.trace, options.limit)
    figures: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    print(f"{'speed':>5}  {'':24}{'ttft p50':>10}{'p99':>9}{'tpot':>9}{'p99':>9}{'broken':>8}{'calls':>8}")
    for speed in map(float, options.speeds.split(",")):
        for way in WAYS:
            memory = parse_bytes(options.memory)
            result = serve(rows, memory, way, speed, options.slo_tpot, options.bands)
            point = {
                "speed": speed,
                "ttft_p50": result.ttft_p50,
                "ttft_p99": result.ttft_p99,
                "tpot_mean": result.tpot_mean,
                "tpot_p99": result.tpot_p99,
                "broken": result.broken / result.requests,
                "calls_a_request": result.calls_caller / max(1, result.admitted),
                "seconds": result.seconds,
            }
            figures[way].append(point)
            print(
                f"{speed:5.2f}  {way:24}{point['ttft_p50']:8.3f} s{point['ttft_p99']:7.2f} s"
                f"{point['tpot_mean'] * 1e3:6.1f} ms{point['tpot_p99'] * 1e3:6.0f} ms{point['broken']:8.1%}"
                f"{point['calls_a_request']:8.1f}",
                flush=True,
            )
    title = f"{Path(options.trace).name}: {len(rows):,} requests, {MODEL} in {options.memory}, simulated time"
    if options.json:
        options.json.write_text(json.dumps({"title": title, "ways": figures}, indent=1) + "\n")
    if options.plot:
        picture(figures, options.plot, title)


if __name__ == "__main__":
    main()
