"""One rank of test_tensor_parallel.py, run by torchrun: `MODEL_FOLDER OUTPUT_FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from vtensor.integrations.tensor_parallel import in_agreement
from vtensor.integrations.transformers import VTensorCache

import vtensor

GREEDY = {"do_sample": False, "max_new_tokens": 24}
PAGE = 4096


def prompt(batch: int, length: int) -> torch.Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(5))


def attempt(model, cache, ids, **method):
    """The tokens, or the error's class and message; and how long it took."""
    begin = time.monotonic()
    try:
        with in_agreement(model, cache, timeout=20):
            out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **method)
        result = {"tokens": out.tolist()}
    except vtensor.VTensorError as error:
        result = {"error": type(error).__name__, "message": str(error)}
    return result | {"seconds": time.monotonic() - begin, "length": cache.get_seq_length()}


def refuse(*states):
    raise vtensor.OutOfPages("[refuse] no addresses")


def main(model_folder: str, output: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    model = AutoModelForCausalLM.from_pretrained(model_folder, tp_plan="auto").eval()
    results = {}

    for name, method in {"greedy": GREEDY, "beams": GREEDY | {"num_beams": 3}}.items():
        cache = VTensorCache(model.config, 256)
        results[name] = attempt(model, cache, prompt(2, 50), **method)
        results[name]["heads"] = [layer.keys.shape[1] for layer in cache.layers]
        cache.reset()

    # Rank 1 alone has too little, once for the prompt and once for the 65th token.
    for name, pages in {"short for the prompt": 3, "short for a step": 5}.items():
        pool = vtensor.Pool("cpu", page_size=PAGE, budget=(pages if rank == 1 else 64) * PAGE)
        cache = VTensorCache(model.config, 256, pool)
        results[name] = attempt(model, cache, prompt(1, 60), **GREEDY)
        results[name]["pages"] = pool.stats().pages_active
        # The next one works, on the same group.
        cache.reset()
        results[name]["after"] = attempt(model, VTensorCache(model.config), prompt(1, 60), **GREEDY)

    # Too little for one batch, on rank 0 alone or on both; the same cache then takes a smaller one.
    for name, pages in {"short on both": (20, 20), "short on one": (20, 999)}.items():
        pool = vtensor.Pool("cpu", page_size=PAGE, budget=pages[rank] * PAGE, prefetch=0)
        cache = VTensorCache(model.config, 256, pool)
        results[name] = attempt(model, cache, prompt(8, 30), **GREEDY)
        results[name]["pages"] = pool.stats().pages_used
        results[name]["after"] = attempt(model, cache, prompt(2, 30), **GREEDY)

    # A layer of rank 1 alone cannot be made for the first forward.
    cache = VTensorCache(model.config, 256)
    if rank == 1:
        cache.layers[1].lazy_initialization = refuse
    results["not made"] = attempt(model, cache, prompt(2, 30), **GREEDY)
    cache.layers[1].__dict__.pop("lazy_initialization", None)
    results["not made"]["after"] = attempt(model, cache, prompt(2, 30), **GREEDY)

    class Stop:  # an error of the user's own, on one rank
        def __call__(self, input_ids, scores, **kwargs):
            if rank == 0 and input_ids.shape[1] == 63:
                raise vtensor.InvalidArgument("[Stop] enough")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    cache = VTensorCache(model.config, 256)
    results["user error"] = attempt(model, cache, prompt(1, 60), stopping_criteria=[Stop()], **GREEDY)

    # Rank 0 does not come: bounded.
    if rank == 1:
        begin = time.monotonic()
        try:
            with in_agreement(model, cache, timeout=2):
                pass
        except vtensor.VTensorError as error:
            results["alone"] = {"message": str(error), "seconds": time.monotonic() - begin}
    else:
        from vtensor.integrations import tensor_parallel

        tensor_parallel._group(dist.group.WORLD, 2)  # a group is made by all
        time.sleep(4)

    Path(output, f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    # Without its teardown: torch 2.13's ends gloo's threads by std::terminate where DTensor made groups.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
