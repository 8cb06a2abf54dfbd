"""vLLM on vtensor beside stock vLLM: ``scripts/vllm.sh bench``, ``engines`` and ``transfer`` run it.

Engines in processes of their own answer a line of JSON for each line that they are given. What is compared
runs in turn, so that the machine's moods hit all. The model is a small Llama with random weights in float32,
on the CPU.

``bench``: tokens a second, memory over time, and what mapping takes: two engines run the same bursts; several
such pairs, since a process has moods too. ``engines``: two engines whose bursts come in turn, in one memory:
a shared budget beside static halves. ``transfer``: the time to the first token of one engine alone, and with
K and V of the prompt from another, over vLLM's NixlConnector. Two engines at a time: waiting ones would take
the cores from others. ``picture RESULT.json OUT.png`` draws memory over time, by matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def make_model(folder: str, positions: int = 1024, **sizes: Any) -> None:
    """A small Llama with random weights in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=positions,
            **sizes,
        )
    ).float().save_pretrained(folder)


def spawn(*arguments: str, ours: bool, **settings: str | None) -> subprocess.Popen:
    """A worker, stock or on vtensor. A setting that is None is unset."""
    environment = os.environ | SETTINGS | {"VTENSOR_VLLM": str(int(ours))}
    for name, value in settings.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, "worker", *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def make_engine(folder: str, length: int, table: int, **options: Any) -> Any:
    from vllm import LLM

    options |= {"skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": True}
    options |= {"max_model_len": length, "dtype": "float32", "block_size": 32, "kv_cache_memory_bytes": table}
    return LLM(folder, **options).llm_engine


def params(tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)


def ask(worker: subprocess.Popen, line: str | None = None) -> dict:
    """The worker's next answer, to ``line`` if there is one."""
    assert worker.stdin is not None and worker.stdout is not None
    if line is not None:
        worker.stdin.write(line + "\n")
        worker.stdin.flush()
    while not (answer := worker.stdout.readline()).startswith("{"):
        if not answer:
            raise SystemExit("a worker ended")
    return json.loads(answer)


def end(worker: subprocess.Popen) -> None:
    assert worker.stdin is not None
    worker.stdin.close()
    worker.wait()


def save(out: Path | None, figures: dict[str, float], **measured: Any) -> None:
    """Prints ``figures``; writes them and what they were made of as JSON, where a file is named."""
    for name, value in figures.items():
        print(f"{name:60s} {value:10,.3f}")
    if out is not None:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, no GPU"
        content = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "figures": figures, **measured}
        out.write_text(json.dumps(content))


def spread(name: str, values: list[float], of: str = "") -> dict[str, float]:
    parts = {"median": statistics.median, "least": min, "most": max}
    return {f"{name}, {part}{of}": function(values) for part, function in parts.items()}


# --- bursts of requests

PAIRS, ROUNDS, REQUESTS, TOKENS = 3, 4, 24, 64
TABLE = 2 << 30  # bytes
TIMED = ("hold", "prepare", "release", "begin_step", "end_step", "whole", "shortage", "trim")


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Timer:
    """The time that the plug-in's calls of vtensor take."""

    def __init__(self, memory) -> None:
        self.memory, self.seconds = memory, 0.0

    def __getattr__(self, name):
        value = getattr(self.memory, name)
        if name not in TIMED:
            return value

        def timed(*args):
            start = time.perf_counter()
            try:
                return value(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


class Bursts:
    """One engine, which runs a burst for each line of its standard input."""

    def __init__(self, folder: str, ours: bool, table: int) -> None:
        from vllm import TokensPrompt

        self.prompt, self.ours, self.before = TokensPrompt, ours, resident()
        self.params = params(TOKENS)
        self.engine = make_engine(folder, 1024, table)
        self.pool = self.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        if ours:
            self.timer = self.pool.memory = Timer(self.pool.memory)

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
    return spawn("bursts", folder, str(int(ours)), str(table), ours=ours, **settings)


def measure_pair(folder: str, pair: int) -> dict[str, list[dict]]:
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


def report(pairs: list[dict[str, list[dict]]]) -> dict[str, float]:
    ours, stock = ([b for pair in pairs for b in bursts_of(pair, name)] for name in ("vtensor", "stock"))
    ratios = [
        median(bursts_of(pair, "vtensor"), "tokens_per_second")
        / median(bursts_of(pair, "stock"), "tokens_per_second")
        for pair in pairs
    ]
    figures = {
        "tokens a second, stock": median(stock, "tokens_per_second"),
        "tokens a second, vtensor": median(ours, "tokens_per_second"),
        **spread("vtensor / stock", ratios, " of the pairs"),
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


def bench(folder: str, out: Path | None) -> None:
    make_model(folder)
    pairs = [measure_pair(folder, pair) for pair in range(PAIRS)]
    save(out, report(pairs), **{"first pair": pairs[0]})


# --- two engines in one memory

MEMORY = 48 << 20  # bytes of K and V; a burst wants some 100 MiB
TURNS = 6


def measure_turns(folder: str) -> dict[str, list[float]]:
    """Seconds of each burst, of the two engines in turn."""
    shared = {"VTENSOR_VLLM_BUDGET": str(MEMORY), "VTENSOR_VLLM_SHARED": f"bench-{os.getpid()}"}
    engines = {
        "halves": [start(folder, False, MEMORY // 2) for _ in range(2)],
        "shared": [start(folder, True, 4 * MEMORY, **shared) for _ in range(2)],
    }
    for workers in engines.values():
        for worker in workers:
            ask(worker)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for seed in range(-2, TURNS):  # the first of each engine warms up
        for name in sorted(engines, reverse=seed % 4 > 1):
            burst = ask(engines[name][seed % 2], str(seed + 2))
            print(f"burst {seed + 1} of {TURNS}, {name}: {burst['seconds']:.2f} s", file=sys.stderr)
            if seed >= 0:
                seconds[name].append(burst["seconds"])
    for workers in engines.values():
        for worker in workers:
            end(worker)
    return seconds


def engines(folder: str, out: Path | None) -> None:
    make_model(folder)
    seconds = measure_turns(folder)
    ratios = [a / b for a, b in zip(seconds["shared"], seconds["halves"], strict=True)]
    figures = {
        "requests of a burst": REQUESTS,
        "MiB of K and V in all": MEMORY / 2**20,
        "seconds of a burst, static halves": statistics.median(seconds["halves"]),
        "seconds of a burst, one budget": statistics.median(seconds["shared"]),
        **spread("one budget / halves", ratios),
    }
    save(out, figures, bursts=seconds)


# --- prefill and decode apart

PASSES, PROMPTS, PROMPT = 2, 4, 2500  # prompts in each pass, and tokens of each
TRANSPORTS = {"tcp": "tcp", "default": None}


class Requests:
    """One engine, which runs a request for each line of its standard input, and steps meanwhile."""

    def __init__(self, folder: str, role: str) -> None:
        from vllm import TokensPrompt

        self.prompt = TokensPrompt
        connector = {"kv_connector": "NixlConnector", "kv_role": role}
        self.engine = make_engine(folder, 4096, 1 << 30, kv_transfer_config=connector)
        self.scheduler = self.engine.engine_core.engine_core.scheduler

    def request(self, name: str, ids: list[int], tokens: int, transfer: dict | None) -> dict:
        extra = {"kv_transfer_params": transfer} if transfer else None
        of = params(tokens, extra_args=extra)
        start, first = time.perf_counter(), 0.0
        self.engine.add_request(name, self.prompt(prompt_token_ids=ids), of)
        while True:
            for output in self.engine.step():
                first = first or time.perf_counter() - start
                if output.finished:
                    answer = {"seconds": first, "tokens": list(output.outputs[0].token_ids)}
                    return answer | {"transfer": output.kv_transfer_params}

    def serve(self) -> None:
        print("{}", flush=True)
        while True:
            if self.scheduler.has_requests():
                self.engine.step()
            if select.select([sys.stdin], [], [], 0.001)[0]:
                line = sys.stdin.readline()
                if not line:
                    return
                print(json.dumps(self.request(**json.loads(line))), flush=True)


def start_one(folder: str, engine: str, transports: str | None, role: str) -> subprocess.Popen:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    settings = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "UCX_TLS": transports}
    return spawn("requests", folder, role, ours=engine == "vtensor", **settings)


def measure_transfer(folder: str, engine: str, over: str, seconds: dict[str, list[float]]) -> list[list[int]]:
    """Of one pair of engines, which then ends: adds to ``seconds``, and gives the tokens of each prompt."""
    pair = [start_one(folder, engine, TRANSPORTS[over], role) for role in ("kv_producer", "kv_consumer")]
    for worker in pair:
        ask(worker)
    rng, said = random.Random(0), []
    for number in range(PROMPTS + 1):  # the first warms up, and introduces them
        ids = [rng.randrange(1024) for _ in range(PROMPT)]
        line = {"name": str(number), "ids": ids, "tokens": 1, "transfer": {"do_remote_decode": True}}
        first = ask(pair[0], json.dumps(line))
        then = ask(pair[1], json.dumps(line | {"tokens": 8, "transfer": first["transfer"]}))
        said.append(then["tokens"])
        if number:
            seconds.setdefault(f"alone, {engine}", []).append(first["seconds"])
            seconds.setdefault(f"K and V from the other, {over}, {engine}", []).append(then["seconds"])
    for worker in pair:
        end(worker)
    return said


def measure_all(folder: str) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {}
    said = []
    pairs = [(engine, over) for over in TRANSPORTS for engine in ("stock", "vtensor")]
    for number in range(PASSES):
        for engine, over in pairs if number % 2 else pairs[::-1]:
            print(f"pass {number + 1} of {PASSES}: {engine}, {over}", file=sys.stderr)
            said.append(measure_transfer(folder, engine, over, seconds))
    if any(tokens != said[0] for tokens in said):
        raise SystemExit("the pairs differ in their tokens")
    return seconds


def transfer(folder: str, out: Path | None) -> None:
    make_model(folder, 4096, initializer_range=0.3)  # so that the tokens depend on K and V
    seconds = measure_all(folder)
    figures: dict[str, float] = {}
    for name, values in sorted(seconds.items()):
        figures |= spread(f"{name}, ms", [1e3 * value for value in values])
    save(out, figures, seconds=seconds)


def main() -> None:
    what, *words = sys.argv[1:] or ["--help"]
    if what == "worker":
        kind, folder, *rest = words
        worker = (
            Requests(folder, *rest) if kind == "requests" else Bursts(folder, rest[0] == "1", int(rest[1]))
        )
        return worker.serve()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {"bench": bench, "engines": engines, "transfer": transfer}
    parser.add_argument("what", choices=[*commands, "picture"])
    parser.add_argument(
        "files", type=Path, nargs="*", help="where the result goes as JSON; of picture, both files"
    )
    options = parser.parse_args()
    if options.what == "picture":
        return draw(*options.files)
    with tempfile.TemporaryDirectory() as folder:
        commands[options.what](folder, *options.files or [None])


if __name__ == "__main__":
    main()
