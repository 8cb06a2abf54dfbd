"""Runs vLLM on small random models, stock or on vtensor, and writes what came out as JSON.

``python scenarios.py stock|vtensor FOLDER [NAME[,SETTING=VALUE...]...]``: models are made in FOLDER, results
go to FOLDER/MODE-NAME.json. A SETTING is a variable of the environment.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of this file, run by workers
    "VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    "VLLM_LOGGING_LEVEL": "INFO",  # the plug-in's lines
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VTENSOR_VLLM": "1" if sys.argv[1] == "vtensor" else "0",
}

import torch  # noqa: E402
import transformers  # noqa: E402
from vllm import LLM, SamplingParams, TokensPrompt  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

ON_VTENSOR = sys.argv[1] == "vtensor"
FOLDER = Path(sys.argv[2])
BLOCK = 32  # tokens
TABLE = 64 << 20  # bytes of addresses
SAID: list[str] = []  # lines of the plug-in in vLLM's log
SMALL = 48  # blocks; of 128 KiB in the models with four layers

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "sliding": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, head_dim=32, sliding_window=64)
    ),
    "hybrid": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **SIZES,
            head_dim=32,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    ),
}


def model(name: str) -> str:
    folder = FOLDER / f"{sys.argv[1]}-{name}"  # not the other mode's, which runs at the same time
    if not folder.exists():
        torch.manual_seed(0)
        MODELS[name]().float().save_pretrained(folder)
    return str(folder)


def prompts(count: int = 24, seed: int = 0, most: int = 200) -> list[TokensPrompt]:
    """Every second one begins with the same 100 tokens."""
    rng = random.Random(seed)
    common = [rng.randrange(1024) for _ in range(100)]
    return [
        TokensPrompt(
            prompt_token_ids=common * (i % 2) + [rng.randrange(1024) for _ in range(rng.randrange(20, most))]
        )
        for i in range(count)
    ]


def greedy(tokens: int = 48, **kw) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **kw)


def looked(memory, used: list[int], leaving: list[int]) -> tuple[float, int]:
    """What is mapped beyond the pages of blocks in use, and of others that a step under way may use, as a
    share; and the bytes mapped for the next step."""
    size = memory.pool.page_size

    def pages(numbers: list[int]) -> int:
        found = set()
        for number in numbers:
            for offset, stride, length in memory.parts:
                begin = offset + number * stride
                found.update(range(begin // size, -(-(begin + length) // size)))
        return len(found)

    stats = memory.arena.stats()
    active = stats.pages_active
    assert active >= pages(used), "a block in use has no memory"
    assert all(memory.whole(used))
    return active / pages(used + leaving) - 1, stats.pages_prefetched * size


def idle(memory) -> dict[str, float]:
    memory.pool.wait_idle()
    stats = memory.arena.stats()
    return {
        "mapped": stats.nbytes_mapped + memory.pool.stats().pages_spare * stats.page_size,
        "cached": stats.pages_cached * stats.page_size,
        "budget": memory.pool.stats().budget,
    }


class Engine:
    """An engine of one scenario. ``blocks``: how many it may have in use, one for none included;
    ``block_bytes``: of a block, in all workers; ``served``: these are processes of their own."""

    def __init__(
        self,
        name: str = "llama",
        blocks: int | None = None,
        block_bytes: int = 128 << 10,
        served: bool = False,
        **options,
    ):
        self.served = served
        workers = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
        table = TABLE // workers
        if blocks is not None and ON_VTENSOR:
            os.environ["VTENSOR_VLLM_BUDGET"] = str(blocks * block_bytes)
        elif blocks is not None:
            table = blocks * block_bytes // workers
        defaults = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 512,
            "dtype": "float32",
            "block_size": BLOCK,
            "disable_log_stats": True,
        }
        self.llm = LLM(model(name), kv_cache_memory_bytes=table, **(defaults | options))
        os.environ.pop("VTENSOR_VLLM_BUDGET", None)
        os.environ.pop("VTENSOR_VLLM_PAGE_SIZE", None)
        self.engine = self.llm.llm_engine
        self.core = getattr(self.engine.engine_core, "engine_core", None)  # None in a process of its own
        self.pool = self.core and self.core.scheduler.kv_cache_manager.block_pool
        if blocks is not None and self.pool is not None:
            assert self.pool.get_num_free_blocks() == blocks - 1
        self.worst = 0.0  # mapped for blocks in use, beyond what these take, as a share
        self.ahead = 0  # bytes mapped for the next step, at most
        self.steps = 0
        self.looked_at: list[int] = []  # blocks, at the last look
        self.most = 0  # blocks in use at once

    def generate(self, prompts, params: SamplingParams) -> list[list[list[int]]]:
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [[list(output.token_ids) for output in request.outputs] for request in outputs]

    def run(self, prompts, params: SamplingParams, abort=lambda step: ()) -> dict[str, list[int]]:
        """Step by step, looking at the memory after each; ``abort(step)`` names requests to abort."""
        for i, prompt in enumerate(prompts):
            self.engine.add_request(str(i), prompt, params)
        done: dict[str, list[int]] = {}
        step = 0
        while self.engine.has_unfinished_requests() or self.core.batch_queue:  # a step planned ahead too
            for output in self.engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
            self.look()
            step += 1
            gone = list(abort(step))
            if gone:
                self.engine.abort_request(gone)
                self.look()
        return dict(sorted(done.items()))

    def look(self) -> None:
        """What is mapped for blocks in use, against the pages of these blocks."""
        self.steps += 1
        if not ON_VTENSOR:
            return
        used = [b.block_id for b in self.pool.blocks if b.ref_cnt > 0 or b.is_null]
        leaving = self.looked_at if self.core.batch_queue else []
        self.looked_at = used
        self.most = max(self.most, len(used))
        for worst, ahead in self.ask(looked, used, leaving):
            self.worst, self.ahead = max(self.worst, worst), max(self.ahead, ahead)

    def ask(self, function, *args) -> list:
        """``function(memory, *args)`` of each worker's memory."""
        if not self.served:
            return [function(self.pool.memory, *args)]
        if self.pool is not None:
            self.pool.memory.whole([0])  # all that was sent to the workers is done
        return self.llm.collective_rpc(lambda worker: function(worker.vtensor.memory, *args))

    def taken_by_others(self) -> int:
        """Bytes of a shared budget that other engines have."""
        return self.pool.memory.pool.stats().nbytes_held_by_others if ON_VTENSOR else 0

    def close(self) -> None:
        if self.served:
            self.engine.engine_core.shutdown()
        elif ON_VTENSOR:
            self.pool.memory.arena.close()
            self.pool.memory.pool.close()

    def memory(self) -> dict[str, float]:
        """Of the idle engine, in the worker that has most beside its cache."""
        if not ON_VTENSOR:
            return {}
        return max(self.ask(idle), key=lambda found: found["mapped"] - found["cached"]) | {
            "worst": self.worst,
            "ahead": self.ahead,
        }


def note(*args, **kwargs):
    """A factory of log records: vLLM takes handlers off the loggers under its own when it configures that."""
    record = logging.LogRecord(*args, **kwargs)
    if record.name == "vllm.vtensor":
        SAID.append(record.getMessage())
    return record


SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


@scenario
def prefix_caching():
    engine = Engine()
    return engine, [engine.generate(prompts(), greedy()) for _ in range(2)]


@scenario
def no_prefix_caching():
    engine = Engine(enable_prefix_caching=False)
    return engine, engine.run(prompts(), greedy())


@scenario
def small_budget():
    """Preemption, and cached blocks that go: 24 requests want five times the memory. Blocks share pages."""
    os.environ["VTENSOR_VLLM_PAGE_SIZE"] = "64KiB"
    engine = Engine(blocks=SMALL)
    return engine, [engine.run(prompts(seed=seed), greedy(64)) for seed in (0, 1, 0)]


@scenario
def small_budget_without_prefix_caching():
    engine = Engine(blocks=SMALL, enable_prefix_caching=False)
    return engine, engine.run(prompts(), greedy(64))


@scenario
def chunked_prefill():
    engine = Engine(blocks=SMALL, enable_chunked_prefill=True, max_num_batched_tokens=64, max_num_seqs=16)
    return engine, engine.run(prompts(most=380), greedy())


@scenario
def several_samples():
    engine = Engine(blocks=2 * SMALL)
    params = SamplingParams(n=3, temperature=0.8, seed=7, max_tokens=40, ignore_eos=True, detokenize=False)
    return engine, engine.generate(prompts(8), params)


@scenario
def aborts():
    engine = Engine(blocks=2 * SMALL)
    gone = {4: ["0", "5"], 9: ["1", "2", "3"], 20: ["7", "11"]}
    return engine, engine.run(prompts(), greedy(), abort=lambda step: gone.get(step, []))


def configure(change) -> None:
    """Runs ``change(config)`` once vLLM has fitted a configuration to CPUs."""
    fit = CpuPlatform.check_and_update_config

    def fit_and_change(config):
        fit(config)
        change(config)

    CpuPlatform.check_and_update_config = staticmethod(fit_and_change)


def schedule_ahead() -> dict[str, bool]:
    """Options of an engine that plans a step while one runs, which vLLM leaves to other devices."""
    configure(lambda config: setattr(config.scheduler_config, "async_scheduling", True))
    return {"async_scheduling": True}


def fork_workers() -> None:
    """Workers are forked, and need not import vLLM again. On CPUs vLLM spawns them, as in
    engine_in_a_process_of_its_own."""
    configure(lambda config: os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="fork"))


@scenario
def asynchronous_scheduling():
    engine = Engine(blocks=2 * SMALL, **schedule_ahead())
    assert engine.core.batch_queue_size == 2
    gone = {6: ["0", "5"], 15: ["1"]}
    return engine, engine.run(prompts(), greedy(), abort=lambda step: gone.get(step, []))


@scenario
def speculation():
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    engine = Engine(blocks=2 * SMALL, speculative_config=config)
    return engine, engine.run(prompts(), greedy())


@scenario
def sliding_window():
    os.environ["VTENSOR_VLLM_PAGE_SIZE"] = "64KiB"  # of two blocks
    engine = Engine("sliding", blocks=2 * SMALL)
    return engine, [engine.run(prompts(most=380), greedy()) for _ in range(2)]


@scenario
def hybrid():
    engine = Engine("hybrid", blocks=2 * SMALL, block_bytes=64 << 10)
    return engine, [engine.run(prompts(most=380), greedy()) for _ in range(2)]


@scenario
def hybrid_in_a_small_budget():
    """Where a request's layers of one kind may get their blocks and those of the other not."""
    os.environ["VTENSOR_VLLM_PAGE_SIZE"] = "64KiB"  # of two blocks
    engine = Engine("hybrid", blocks=2 * SMALL, block_bytes=64 << 10, max_model_len=256)
    return engine, [engine.run(prompts(seed=seed, most=150), greedy(64)) for seed in (0, 1, 0)]


@scenario
def bounded_cache():
    os.environ["VTENSOR_VLLM_CACHE"] = "0.17"  # 2 MiB
    engine = Engine(blocks=2 * SMALL)
    return engine, [engine.run(prompts(12), greedy()) for _ in range(2)]


@scenario
def sleep():
    engine = Engine()
    first = engine.generate(prompts(), greedy())
    engine.llm.sleep(level=1)
    asleep = engine.memory()
    engine.llm.wake_up()
    return engine, [first, engine.generate(prompts(), greedy())], {"asleep": asleep}


@scenario
def memory_taken_by_others():
    """What the prefix cache keeps goes to a tensor of the same pool, and requests that would have hit it are
    computed again."""
    engine = Engine(blocks=3 * SMALL)
    results = [engine.run(prompts(12), greedy())]
    if ON_VTENSOR:
        import vtensor

        pool = engine.pool.memory.pool
        other = vtensor.empty(0, grow_dim=0, capacity=pool.stats().budget, dtype=torch.uint8, pool=pool)
        other.extend(pool.stats().budget - (2 << 20)).fill_(255)
        other.close()
    results.append(engine.run(prompts(12), greedy()))
    return engine, results, {"indexed": len(engine.pool.cached_block_hash_to_block)}


@scenario
def two_engines():
    return in_one_budget()


@scenario
def two_engines_with_workers():
    fork_workers()
    return in_one_budget(served=True, distributed_executor_backend="mp")


def in_one_budget(**options):
    """Engines of two processes: bursts in turn, of which each wants more than the whole."""
    if ON_VTENSOR:
        os.environ["VTENSOR_VLLM_SHARED"] = f"test-{os.getpid()}"
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    other, seed = (ours, 0) if child else (theirs, 1)
    engine = Engine(blocks=SMALL, **options)
    results, held = [], []
    if not child:
        other.send("your turn")
    for _ in range(2):
        other.recv()
        results.append(engine.run(prompts(seed=seed), greedy(64)))
        held.append(engine.most)
        other.send("your turn")
    other.recv()
    if not child:
        other.send([results, held])
        engine.close()
        os._exit(0)
    other.send("the end")
    their_results, their_held = other.recv()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return engine, [results, their_results], {"held": [held, their_held]}


@scenario
def two_workers():
    """Tensor parallel, in a small budget: preemption, and cached blocks that go."""
    fork_workers()
    engine = Engine(blocks=SMALL, served=True, tensor_parallel_size=2)
    return engine, [engine.run(prompts(10, seed=seed), greedy(24)) for seed in (0, 1, 0)]


@scenario
def two_workers_with_asynchronous_scheduling():
    fork_workers()
    engine = Engine(blocks=SMALL, served=True, tensor_parallel_size=2, **schedule_ahead())
    gone = {6: ["0", "5"], 15: ["1"]}
    return engine, engine.run(prompts(10), greedy(24), abort=lambda step: gone.get(step, []))


@scenario
def two_workers_in_a_shared_budget():
    fork_workers()
    if ON_VTENSOR:
        os.environ["VTENSOR_VLLM_SHARED"] = f"test-{os.getpid()}"
    engine = Engine(blocks=SMALL, served=True, tensor_parallel_size=2)
    return engine, [engine.run(prompts(8, seed=seed), greedy(24)) for seed in (0, 1)]


@scenario
def two_stages():
    """Pipeline parallel: two batches are under way at once."""
    fork_workers()
    engine = Engine(blocks=SMALL, served=True, pipeline_parallel_size=2, max_num_seqs=8)
    engine.llm.collective_rpc(lambda worker: worker.model_runner.profile_run())  # makes buffers of stages
    return engine, [engine.run(prompts(16, seed=seed), greedy()) for seed in (0, 1, 0)]


@scenario
def engine_in_a_process_of_its_own():
    """As ``vllm serve`` runs it: the scheduler's process and the worker's are others."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    engine = Engine(blocks=SMALL, served=True)
    results = [engine.generate(prompts(seed=seed), greedy()) for seed in (0, 1, 0)]
    engine.llm.sleep(level=1)
    asleep = engine.memory()
    engine.llm.wake_up()
    results.append(engine.generate(prompts(), greedy()))
    return engine, results, {"asleep": asleep}


@scenario
def a_worker_is_killed():
    fork_workers()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    engine = Engine(served=True, tensor_parallel_size=2)
    memory, workers = engine.memory(), engine.llm.collective_rpc(lambda worker: os.getpid())
    threading.Timer(2, lambda: os.kill(workers[1], signal.SIGKILL)).start()
    start, failed = time.monotonic(), None
    while failed is None and time.monotonic() < start + 60:
        try:
            engine.generate(prompts(16), greedy(200))
        except Exception as error:
            failed = type(error).__name__
    engine.memory = lambda: memory
    return engine, failed, {"seconds": time.monotonic() - start}


@scenario
def killed_engine():
    """Of two in one budget, one is killed amid a burst that has taken the whole."""
    if ON_VTENSOR:
        os.environ["VTENSOR_VLLM_SHARED"] = f"test-{os.getpid()}"
    ready, begin = os.pipe(), os.pipe()
    child = os.fork()
    engine = Engine(blocks=SMALL)
    if not child:
        os.read(begin[0], 1)

        def report(step):
            if step == 20:
                os.write(ready[1], b"!")
                time.sleep(600)
            return ()

        engine.run(prompts(), greedy(64), abort=report)
        os._exit(1)
    os.write(begin[1], b"!")
    os.read(ready[0], 1)
    taken = engine.taken_by_others()
    os.kill(child, signal.SIGKILL)
    killed = time.monotonic()
    while engine.taken_by_others() and time.monotonic() < killed + 30:
        time.sleep(0.01)
    after = {"taken": taken, "seconds": time.monotonic() - killed}
    os.waitpid(child, 0)
    return engine, engine.run(prompts(seed=1), greedy(64)), after | {"held": engine.most}


def prepare_to_fork() -> None:
    """Imports what engines import, so that forked ones need not, and keeps it out of their garbage
    collections. A spawned engine has the plug-in first, as in production."""
    importlib.import_module("vllm.model_executor.layers.quantization.online.base")
    importlib.import_module("vllm.model_executor.models.llama")
    importlib.import_module("vllm.v1.worker.cpu_worker")
    gc.freeze()


def main() -> None:
    """Each scenario in a child of its own, which need not import vLLM again."""
    logging.setLogRecordFactory(note)
    prepare_to_fork()
    failed = []
    for name in sys.argv[3:] or SCENARIOS:
        begun = time.monotonic()
        child = os.fork()
        if child == 0:
            try:
                name, *settings = name.split(",")
                os.environ.update(setting.split("=") for setting in settings)
                engine, tokens, *more = SCENARIOS[name]()
                result = {"tokens": tokens, "memory": engine.memory(), "steps": engine.steps, "said": SAID}
                result |= dict(*more)
                (FOLDER / f"{sys.argv[1]}-{name}.json").write_text(json.dumps(result))
                engine.close()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            failed.append(name)
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
