"""Time to the first token, of one engine alone, and with K and V of the prompt from another, over vLLM's
NixlConnector: stock vLLM, and vLLM on vtensor.

``scripts/vllm.sh transfer`` runs it. Two engines at a time, each in a process of its own: waiting ones would
take the cores from others. All pairs take the same prompts, in passes to and fro, so that the machine's moods
hit all. The model is a small Llama with random weights in float32, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vllm_engines import ask, end, make_model, save, spawn

PASSES, ROUNDS, PROMPT = 2, 4, 2500  # prompts in each pass, and tokens of each
TABLE = 1 << 30  # bytes
TRANSPORTS = {"tcp": "tcp", "default": None}
ENGINES = ("stock", "vtensor")


class Worker:
    """One engine, which runs a request for each line of its standard input, and steps meanwhile."""

    def __init__(self, folder: str, role: str) -> None:
        from vllm import LLM, SamplingParams, TokensPrompt

        self.prompt, self.params = TokensPrompt, SamplingParams
        options = {"skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": True}
        shape = {"max_model_len": 4096, "dtype": "float32", "block_size": 32, "kv_cache_memory_bytes": TABLE}
        connector = {"kv_connector": "NixlConnector", "kv_role": role}
        self.engine = LLM(folder, kv_transfer_config=connector, **options, **shape).llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler

    def request(self, name: str, ids: list[int], tokens: int, transfer: dict | None) -> dict:
        extra = {"kv_transfer_params": transfer} if transfer else None
        params = self.params(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        start, first = time.perf_counter(), 0.0
        self.engine.add_request(name, self.prompt(prompt_token_ids=ids), params)
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


def start(folder: str, engine: str, transports: str | None, role: str) -> subprocess.Popen:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    settings = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "UCX_TLS": transports}
    return spawn(__file__, folder, role, ours=engine == "vtensor", **settings)


def measure(folder: str, engine: str, over: str, seconds: dict[str, list[float]]) -> list[list[int]]:
    """Of one pair of engines, which then ends: adds to ``seconds``, and gives the tokens of each prompt."""
    pair = [start(folder, engine, TRANSPORTS[over], role) for role in ("kv_producer", "kv_consumer")]
    for worker in pair:
        ask(worker)
    rng, said = random.Random(0), []
    for number in range(ROUNDS + 1):  # the first warms up, and introduces them
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
    pairs = [(engine, over) for over in TRANSPORTS for engine in ENGINES]
    for number in range(PASSES):
        for engine, over in pairs if number % 2 else pairs[::-1]:
            print(f"pass {number + 1} of {PASSES}: {engine}, {over}", file=sys.stderr)
            said.append(measure(folder, engine, over, seconds))
    if any(tokens != said[0] for tokens in said):
        raise SystemExit("the pairs differ in their tokens")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="where the result goes as JSON")
    arguments = parser.parse_args()
    if arguments.worker:
        return Worker(*arguments.worker).serve()
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, 4096, initializer_range=0.3)  # so that the tokens depend on K and V
        seconds = measure_all(folder)
    figures = {
        f"{name}, ms, {what}": 1e3 * of(values)
        for name, values in sorted(seconds.items())
        for what, of in (("median", statistics.median), ("least", min), ("most", max))
    }
    for name, value in figures.items():
        print(f"{name:60s} {value:8,.0f}")
    save(arguments.out, figures, seconds=seconds)


if __name__ == "__main__":
    main()
