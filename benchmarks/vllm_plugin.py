"""vLLM on vtensor beside stock vLLM: tokens a second, memory over time, and what mapping takes.

``scripts/vllm.sh bench`` runs it. Two engines, each in a process of its own, run the same bursts in turn, so
that the machine's moods hit both; several such pairs, since a process has moods too. The model is a small
Llama with random weights in float32, on the CPU.
``python benchmarks/vllm_plugin.py --picture RESULT.json OUT.png`` draws memory over time, by matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vllm_engines import ask, end, make_model, save, spawn

PAIRS, ROUNDS, REQUESTS, TOKENS = 3, 4, 24, 64
TABLE = 2 << 30  # bytes
TIMED = ("hold", "prepare", "release", "begin_step", "end_step", "whole", "trim")


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Timer:
    """The time that the plug-in's calls of vtensor take."""

    def __init__(self, blocks) -> None:
        self.blocks, self.seconds = blocks, 0.0

    def __getattr__(self, name):
        value = getattr(self.blocks, name)
        if name not in TIMED:
            return value

        def timed(*args):
            start = time.perf_counter()
            try:
                return value(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return timed

    def __len__(self) -> int:
        return len(self.blocks)


class Worker:
    """One engine, which runs a burst for each line of its standard input."""

    def __init__(self, folder: str, ours: bool, table: int) -> None:
        from vllm import LLM, SamplingParams, TokensPrompt

        self.prompt, self.ours, self.before = TokensPrompt, ours, resident()
        self.params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        options = {"skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": True}
        shape = {"max_model_len": 1024, "dtype": "float32", "block_size": 32, "kv_cache_memory_bytes": table}
        self.engine = LLM(folder, **options, **shape).llm_engine
        self.pool = self.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        if ours:
            self.timer = self.pool.memory.blocks = Timer(self.pool.memory.blocks)

    def calls(self) -> int:
        return sum(self.pool.memory.pool.stats().driver_calls["caller"].values()) if self.ours else 0

    def burst(self, seed: int) -> dict:
        rng = random.Random(seed)
        for i in range(REQUESTS):
            ids = [rng.randrange(1024) for _ in range(rng.randrange(20, 400))]
            self.engine.add_request(f"{seed}-{i}", self.prompt(prompt_token_ids=ids), self.params)
        timed = self.timer.seconds if self.ours else 0.0
        calls, memory, quiet = self.calls(), [(time.time(), resident())], [0, 0]
        start = time.perf_counter()
        while self.engine.has_unfinished_requests():
            free, seen = self.pool.free_block_queue.num_free_blocks, self.calls()
            self.engine.step()
            if self.pool.free_block_queue.num_free_blocks == free:
                quiet = [quiet[0] + 1, quiet[1] + self.calls() - seen]
            memory.append((time.time(), resident()))
        seconds = time.perf_counter() - start
        return {
            "tokens_per_second": REQUESTS * TOKENS / seconds,
            "seconds": seconds,
            "mapping_seconds": self.timer.seconds - timed if self.ours else 0.0,
            "driver_calls": self.calls() - calls,
            "steps_without_a_new_block": quiet[0],
            "driver_calls_in_these": quiet[1],
            "resident": memory,
        }

    def idle(self) -> dict:
        """After the prefix cache was dropped."""
        self.pool.reset_prefix_cache()
        if self.ours:
            self.pool.memory.pool.wait_idle()
        return {"resident": [(time.time(), resident())], "before_the_engine": self.before}

    def serve(self) -> None:
        print(json.dumps({"resident": [(time.time(), resident())]}), flush=True)
        for line in sys.stdin:
            print(json.dumps(self.burst(int(line)) if line.strip() != "idle" else self.idle()), flush=True)


def start(folder: str, ours: bool, table: int = TABLE, **settings: str) -> subprocess.Popen:
    return spawn(__file__, folder, str(int(ours)), str(table), ours=ours, **settings)


def measure(folder: str, pair: int) -> dict[str, list[dict]]:
    """One pair of processes: as they have just begun, then their bursts, then idle."""
    workers = {"stock": start(folder, False), "vtensor": start(folder, True)}
    results: dict[str, list[dict]] = {name: [ask(worker)] for name, worker in workers.items()}
    for seed in range(ROUNDS + 1):  # the first warms up
        order = list(workers) if (seed + pair) % 2 else list(workers)[::-1]
        for name in order:
            print(f"pair {pair + 1} of {PAIRS}, burst {seed} of {ROUNDS}, {name}", file=sys.stderr)
            results[name].append(ask(workers[name], str(seed)))
    for name, worker in workers.items():
        results[name].append(ask(worker, "idle"))
        end(worker)
    return results


def median(bursts: list[dict], key: str) -> float:
    return statistics.median(burst[key] for burst in bursts)


def bursts_of(pair: dict[str, list[dict]], name: str) -> list[dict]:
    return [r for r in pair[name] if "seconds" in r][1:]


def report(pairs: list[dict[str, list[dict]]]) -> dict:
    ours, stock = ([b for pair in pairs for b in bursts_of(pair, name)] for name in ("vtensor", "stock"))
    ratios = [
        median(bursts_of(pair, "vtensor"), "tokens_per_second")
        / median(bursts_of(pair, "stock"), "tokens_per_second")
        for pair in pairs
    ]
    figures = {
        "tokens a second, stock": median(stock, "tokens_per_second"),
        "tokens a second, vtensor": median(ours, "tokens_per_second"),
        "vtensor / stock, median of the pairs": statistics.median(ratios),
        "vtensor / stock, least of the pairs": min(ratios),
        "vtensor / stock, most of the pairs": max(ratios),
        "time in vtensor's calls, % of the bursts": 100
        * sum(b["mapping_seconds"] for b in ours)
        / sum(b["seconds"] for b in ours),
        "driver calls of the scheduler's thread": sum(b["driver_calls"] for b in ours),
        "steps that take no new block": sum(b["steps_without_a_new_block"] for b in ours),
        "driver calls in these": sum(b["driver_calls_in_these"] for b in ours),
    }
    for name, rounds in pairs[0].items():
        figures[f"MiB resident with an engine just made, {name}"] = rounds[0]["resident"][0][1] / 2**20
        most = max(bytes_ for r in rounds for _, bytes_ in r["resident"])
        figures[f"MiB resident at most, {name}"] = most / 2**20
        figures[f"MiB resident idle, {name}"] = rounds[-1]["resident"][0][1] / 2**20
    return figures


def draw(result: Path, picture: Path) -> None:
    import matplotlib.pyplot as plt

    data = json.loads(result.read_text())
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for name, label in (("stock", "stock vLLM"), ("vtensor", "vLLM on vtensor")):
        points = [point for r in data["first pair"][name] for point in r["resident"]]
        begin = points[0][0]
        axes.plot([t - begin for t, _ in points], [b / 2**20 for _, b in points], label=label)
    axes.set(xlabel="seconds", ylabel="MiB resident", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--picture", nargs=2, type=Path, metavar=("RESULT", "PNG"))
    parser.add_argument("--out", type=Path, help="where the result goes as JSON")
    arguments = parser.parse_args()
    if arguments.worker:
        folder, ours, table = arguments.worker
        return Worker(folder, ours == "1", int(table)).serve()
    if arguments.picture:
        return draw(*arguments.picture)
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        pairs = [measure(folder, pair) for pair in range(PAIRS)]
    figures = report(pairs)
    for name, value in figures.items():
        print(f"{name:50s} {value:10,.3f}")
    save(arguments.out, figures, **{"first pair": pairs[0]})


if __name__ == "__main__":
    main()
