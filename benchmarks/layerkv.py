"""First come first served and LayerKV in the same memory: times to the first token, times per token, broken
promises, driver calls.

``python -m benchmarks.layerkv trace TRACE`` serves a recorded trace at rising rates. ``python -m
benchmarks.layerkv sweep`` serves made ones: short and long prompts and answers, with too little and enough
memory, at low and high load; ``case`` serves one where the computation is what is short.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from vtensor._base.arguments import byte_count
from vtensor.replay import (
    Row,
    Server,
    ServiceModel,
    default_layer_group,
    model_shape,
    open_cache,
    read_trace,
    replay,
)
from vtensor.replay.simulate import Result

from .report import to_json

Points = list[dict[str, Any]]

MODEL, PAGE, SLOTS = "llama-3-8b", 2 << 20, 256
WAYS = {  # policy, and color of its line
    "paged": ("paged", "#e0a33e"),
    "first come": ("vtensor", "#1b9aaa"),
    "LayerKV": ("layerkv", "#2b4c7e"),
}
SPREAD, LONGEST = 0.8, 4  # of lengths: the sigma of their logarithms, and the longest, in means

PROMPTS, ANSWERS = (256, 1024, 2048, 8192), (16, 128, 512)
MEMORY, LOADS = (0.25, 0.5, 1.0, 2.0), (0.5, 1.0, 1.5)
AMPLE = 16.0  # of what the rate needs
WORSE, BETTER = 1.05, 3.0  # the bars: at most so much worse anywhere; so much better where memory is short


def generate(prompt: float, answer: float, rate: float, requests: int, seed: int = 0) -> list[Row]:
    """A trace of requests that arrive independently, ``rate`` a second.

    Args:
        prompt, answer: means of the tokens. Lengths are log-normal; none is over four means.
    """
    draw, now = random.Random(seed), 0.0

    def length(mean: float) -> int:
        drawn = draw.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)
        return max(1, round(min(drawn, LONGEST * mean)))

    rows = []
    for _ in range(requests):
        rows.append(Row(now, length(prompt), length(answer)))
        now += draw.expovariate(rate)
    return rows


@dataclass(frozen=True)
class Point:
    """Means of prompt and answer; the memory, as a part of what the rate needs; the rate, as a part of what
    the device computes with memory for all."""

    prompt: int
    answer: int
    memory: float
    load: float

    @property
    def most(self) -> float:
        """Requests a second that the device computes with a token of every slot in each iteration."""
        return 1 / (self._alone() + self.answer * ServiceModel().step_seconds / SLOTS)

    def needs(self) -> float:
        """Bytes for K and V of the requests that are served at a time: rate times their time. From a load of
        0.9 on that has no bound, so there it is that of 0.9."""
        rate = min(self.load, 0.9) * self.most
        step = ServiceModel().step_seconds / (1 - rate * self._alone())
        running = min(SLOTS, rate * self.answer * step)
        return (running * (self.prompt + self.answer / 2) + 2 * self.prompt) * model_shape(MODEL).token_bytes

    def _alone(self) -> float:
        """Seconds of a request, without the fixed time of its iterations."""
        device, token = ServiceModel(), model_shape(MODEL).token_bytes
        read = self.answer * (self.prompt + self.answer / 2) * token / device.kv_bytes_per_second
        return (self.prompt + self.answer) / device.tokens_per_second + read

    def rows(self, requests: int) -> list[Row]:
        return generate(self.prompt, self.answer, self.load * self.most, requests)


def serve(rows: list[Row], memory: int, policy: str, lookahead: int, **options: float) -> Result:
    shape = model_shape(MODEL)
    longest = max(row.prompt_tokens + row.output_tokens for row in rows)
    server = Server(
        shape=shape,
        memory=memory,
        max_batch=SLOTS,
        max_len=longest,
        page_size=PAGE,
        layer_group=default_layer_group(shape, PAGE),
        lookahead=lookahead,
    )
    with open_cache(policy, server) as cache:
        return replay(policy, cache, rows, token_bytes=shape.token_bytes, **options)


def figures(result: Result) -> dict[str, float]:
    return {
        "ttft_p50": result.ttft_p50,
        "ttft_p99": result.ttft_p99,
        "tpot_mean": result.tpot_mean,
        "tpot_p99": result.tpot_p99,
        "broken": result.broken / result.requests,
        "calls_a_request": result.calls_caller / result.requests,
        "copied_pages_a_request": result.copied_bytes / PAGE / result.requests,
        "seconds": result.seconds,
    }


# ---------------------------------------------------------------------------------------------- the sweep


def sweep(points: list[Point], requests: int) -> Iterator[dict[str, Any]]:
    """Each point, served first come first served, by LayerKV, and first come with memory for all. Without
    look-ahead, whose thread works in real time, each run gives the same figures."""
    ample: dict[tuple[int, int, float], Result] = {}
    for point in points:
        rows = point.rows(requests)
        longest = max(row.prompt_tokens + row.output_tokens for row in rows)
        least = 1.1 * longest * model_shape(MODEL).token_bytes  # the longest request has to fit
        memory = round(max(point.memory * point.needs(), least))
        kind = (point.prompt, point.answer, point.load)
        if kind not in ample:
            ample[kind] = serve(rows, round(max(AMPLE * point.needs(), 4 * least)), "vtensor", 0)
        first, ours = (serve(rows, memory, policy, 0) for policy in ("vtensor", "layerkv"))
        yield (
            asdict(point)
            | {
                "memory_bytes": memory,
                "first_come": figures(first),
                "layerkv": figures(ours),
                "ample": figures(ample[kind]),
            }
            | verdict(figures(first), figures(ours), figures(ample[kind]))
        )


def verdict(
    first: dict[str, float], ours: dict[str, float], ample: dict[str, float]
) -> dict[str, float | bool]:
    """What LayerKV changed, and whether it kept the bars. Memory is what is short where enough of it would
    make first tokens at least three times as early."""
    calls = ours["calls_a_request"] - WORSE * first["calls_a_request"]
    ttft, tpot = ours["ttft_p99"] / first["ttft_p99"], ours["tpot_mean"] / max(first["tpot_mean"], 1e-9)
    worse = {
        "ttft_worse": ttft > WORSE,
        "tpot_worse": tpot > WORSE,
        "broken_worse": ours["broken"] > first["broken"],
        "calls_worse": calls > 1 + ours["copied_pages_a_request"],
    }
    short = first["ttft_p99"] >= BETTER * ample["ttft_p99"]
    return {"ttft": ttft, "tpot": tpot, **worse, "memory_short": short, "better": ttft <= 1 / BETTER}


def sweep_picture(points: Points, path: Path) -> None:
    """A panel for each load and memory; in each, prompts over answers, colored by the times to the first
    token."""
    import pandas
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.4), layout="constrained")
    panels = figure.subplots(len(LOADS), len(MEMORY), sharex=True, sharey=True)
    frame = pandas.DataFrame(points)
    for axis, (load, memory) in zip(panels.flat, product(LOADS, MEMORY), strict=True):
        cells = frame[(frame["load"] == load) & (frame["memory"] == memory)]
        grid = cells.pivot(index="prompt", columns="answer", values="ttft").reindex(PROMPTS, columns=ANSWERS)
        norm = LogNorm(1 / 4, 4)
        image = axis.imshow(grid, norm=norm, cmap="RdYlBu_r", origin="lower", aspect="auto")
        for cell in cells.itertuples():
            x, y = ANSWERS.index(cell.answer), PROMPTS.index(cell.prompt)
            text, color = f"{cell.ttft:.2f}\n{cell.tpot:.2f}", "white" if cell.ttft < 0.35 else "black"
            axis.text(x, y, text, ha="center", va="center", fontsize=8, color=color)
            if not cell.memory_short:
                axis.plot([x - 0.5, x + 0.5], [y - 0.5, y + 0.5], color="#8a959b", linewidth=0.8)
        axis.set_xticks(range(len(ANSWERS)), [f"{answer}" for answer in ANSWERS])
        axis.set_yticks(range(len(PROMPTS)), [f"{prompt:,}" for prompt in PROMPTS])
        axis.set_title(f"load {load:g}, memory {memory:g} of need", fontsize=9)
        axis.set(xlabel="answer, tokens", ylabel="prompt, tokens")
        axis.label_outer()
    bar = figure.colorbar(image, ax=panels, ticks=(0.25, 0.5, 1, 2, 4), format="%g")
    bar.set_label("time to the first token, 99th percentile: LayerKV / first come")
    bar.minorticks_off()
    figure.suptitle(
        "above: time to the first token, 99th percentile; below: time per later token; both LayerKV / first "
        "come\nstruck out: memory is not what is short",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


def run_sweep(options: argparse.Namespace) -> None:
    points = [Point(*each) for each in product(PROMPTS, ANSWERS, MEMORY, LOADS)]
    points.sort(key=lambda point: (point.prompt, point.answer, point.load))
    chosen = points[:: options.every]
    done: Points = []
    print(f"{'prompt':>7}{'answer':>7}{'memory':>7}{'load':>5}{'ttft p99':>18}{'tpot':>18}{'broken':>16}")
    for point in sweep(chosen, options.requests):
        done.append(point)
        first, ours = point["first_come"], point["layerkv"]
        missed = " ".join(name for name in point if name.endswith("_worse") and point[name])
        print(
            f"{point['prompt']:7,}{point['answer']:7}{point['memory']:7}{point['load']:5}"
            f"{first['ttft_p99']:8.2f}{ours['ttft_p99']:8.2f} s{first['tpot_mean'] * 1e3:8.1f}"
            f"{ours['tpot_mean'] * 1e3:7.1f} ms{first['broken']:8.1%}{ours['broken']:8.1%}  {missed}",
            flush=True,
        )
        print(f"{len(done)} of {len(chosen)}", end="\r", file=sys.stderr, flush=True)
    short = sum(point["memory_short"] for point in done)
    print(f"{len(done)} points; memory is what is short at {short}")
    print(f"at least {BETTER:g} times earlier: {sum(point['better'] for point in done)}")
    for bar in ("ttft_worse", "tpot_worse", "broken_worse", "calls_worse"):
        print(f"{bar}: {sum(point[bar] for point in done)}")
    settings = {"model": MODEL, "requests": options.requests, "worse": WORSE, "better": BETTER}
    save(options.json, {"settings": settings, "points": done})
    if options.plot:
        sweep_picture(done, options.plot)


def save(path: Path | None, result: dict[str, Any]) -> None:
    """Where a file is named: with a line for each point, and four digits, so that it stays readable."""
    if path is not None:
        rounded = json.loads(json.dumps(result), parse_float=lambda digits: float(f"{float(digits):.4g}"))
        path.write_text(to_json(rounded, levels=2) + "\n")


# ------------------------------------------------------------------------------------------ rising rates


def run_at(
    speeds: Iterable[float], ways: Iterable[str], rows: list[Row], memory: int, **options: float
) -> Points:
    """Serves the rows in each way, so many times as fast."""
    found = []
    print(f"{'speed':>5}  {'':11}{'ttft p50':>10}{'p99':>9}{'tpot':>10}{'p99':>9}{'broken':>8}{'calls':>8}")
    for speed, way in product(speeds, ways):
        each = figures(serve(rows, memory, WAYS[way][0], 32, speed=speed, **options))
        found.append({"speed": speed, "way": way} | each)
        print(
            f"{speed:5.2f}  {way:11}{each['ttft_p50']:8.3f} s{each['ttft_p99']:7.2f} s"
            f"{each['tpot_mean'] * 1e3:7.1f} ms{each['tpot_p99'] * 1e3:6.0f} ms{each['broken']:8.1%}"
            f"{each['calls_a_request']:8.1f}",
            flush=True,
        )
    return found


def run_case(options: argparse.Namespace) -> None:
    """Long prompts and short answers, at rates at which the computation is what is short."""
    rows = generate(2048, 28, 1.0, 1500)
    save(options.json, {"points": run_at((3.5, 4.0, 4.5), ("first come", "LayerKV"), rows, 4 << 30)})


def run_trace(options: argparse.Namespace) -> None:
    rows = read_trace(options.trace, options.limit)
    speeds = map(float, options.speeds.split(","))
    memory = byte_count("layerkv", "--memory", options.memory)
    points = run_at(speeds, WAYS, rows, memory, slo_tpot=options.slo_tpot)
    title = f"{Path(options.trace).name}: {len(rows):,} requests, {MODEL} in {options.memory}, simulated time"
    save(options.json, {"title": title, "points": points})
    if options.plot:
        picture(points, options.plot, title)


def picture(points: Points, path: Path, title: str) -> None:
    import pandas
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    values = pandas.DataFrame(points).pivot(index="speed", columns="way")
    for axis, (key, scale, name) in zip(
        figure.subplots(1, 3),
        (
            ("ttft_p99", 1, "time to first token, 99th percentile (s)"),
            ("tpot_mean", 1e3, "time per later token, mean (ms)"),
            ("broken", 100, "broken promises (%)"),
        ),
        strict=True,
    ):
        for way, (_, color) in WAYS.items():
            axis.plot(values[key, way] * scale, label=way, color=color, marker=".")
        axis.set(title=name, xlabel="requests come so many times as fast as recorded")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
        if key == "broken":
            axis.set_ylim(0, 100)
        else:
            axis.set_yscale("log")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontweight="bold")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    trace = commands.add_parser("trace")
    trace.set_defaults(run=run_trace)
    trace.add_argument("trace")
    trace.add_argument("--memory", default="10GiB")
    trace.add_argument("--limit", type=int, default=3000)
    trace.add_argument("--speeds", default="0.7,0.8,0.85,0.9")
    trace.add_argument("--slo-tpot", type=float, default=0.2)
    case = commands.add_parser("case", help="2,048 tokens of prompt and 28 of answer in 4 GiB")
    case.set_defaults(run=run_case)
    made = commands.add_parser("sweep")
    made.set_defaults(run=run_sweep)
    made.add_argument("--requests", type=int, default=400)
    made.add_argument("--every", type=int, default=1, help="only every nth point (default: %(default)s)")
    for command in (trace, case, made):
        command.add_argument("--json", type=Path)
    for command in (trace, made):
        command.add_argument("--plot", type=Path)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
