"""What the benchmarks of vLLM share: engines in processes of their own, which answer a line of JSON for each
line that they are given, their model, and how a result is saved."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
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


def spawn(script: str, *arguments: str, ours: bool, **settings: str | None) -> subprocess.Popen:
    """``script --worker arguments``, stock or on vtensor. A setting that is None is unset."""
    environment = os.environ | SETTINGS | {"VTENSOR_VLLM": str(int(ours))}
    for name, value in settings.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", script, "--worker", *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


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
    """Writes ``figures`` and what they were made of as JSON, where a file is named."""
    if out is None:
        return
    machine = f"{platform.machine()}, {os.cpu_count()} cores, no GPU"
    content = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "figures": figures, **measured}
    out.write_text(json.dumps(content))
