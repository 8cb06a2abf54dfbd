"""Prefill in one process, decode in another, over vLLM's NixlConnector; what came out, as JSON.

``python transfer.py stock|vtensor FOLDER [NAME...]``: as ``scenarios.py``, and results go to
FOLDER/MODE-transfer-NAME.json.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import torch
import transformers
from scenarios import FOLDER, MODELS, ON_VTENSOR, SIZES, SMALL, Engine, greedy, prepare_to_fork, prompts
from vllm import TokensPrompt
from vllm.distributed.kv_transfer import get_kv_transfer_group

PATIENCE = 60.0  # seconds, for whatever one waits for
NAMED = "tcp,self,posix,sysv,cma"
TOKENS = 24
ROLES = ("kv_producer", "kv_consumer")
PR_SET_PDEATHSIG = 1

# With weights so large that the tokens depend on K and V.
SIZES = SIZES | {"initializer_range": 0.3}
MODELS["lively"] = lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
MODELS["lively_hybrid"] = lambda: transformers.Gemma3ForCausalLM(
    transformers.Gemma3TextConfig(
        **SIZES, head_dim=32, sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2
    )
)

# Forks, so that the two need not import vLLM again.
processes = multiprocessing.get_context("fork")


def port_holder() -> socket.socket:
    """A socket for as long as its port is wanted: the system gives the port to no other socket, but one that
    asks for it by number may listen there, if it sets SO_REUSEADDR too."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


class Side(Engine):
    """An engine of one of the two sides, that looks at its memory after every step."""

    def __init__(
        self, role: str, lease: int = 30, model_name: str = "lively", policy: str = "fail", **options
    ):
        self.port = port_holder()  # vLLM waits for ever to listen there if another socket does
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.port.getsockname()[1])
        super().__init__(
            model_name,
            kv_transfer_config={
                "kv_connector": "NixlConnector",
                "kv_role": role,
                "kv_buffer_device": "cpu",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {"kv_lease_duration": lease},
            },
            **options,
        )
        self.scheduler = self.core.scheduler
        self.done: dict[str, object] = {}
        self.names: dict[str, str] = {}  # that vLLM gave to requests
        self.received = 0  # tokens, from the other side
        connector = self.scheduler.connector
        connector.update_state_after_alloc = self._counting(connector.update_state_after_alloc)

    def _counting(self, update: Callable) -> Callable:
        def update_state_after_alloc(request, blocks, num_external_tokens: int) -> None:
            self.received += num_external_tokens
            update(request, blocks, num_external_tokens)

        return update_state_after_alloc

    def add(
        self, name: str, prompt: TokensPrompt, transfer: dict | None = None, tokens: int = TOKENS
    ) -> None:
        extra = {"extra_args": {"kv_transfer_params": transfer}} if transfer else {}
        self.engine.add_request(name, prompt, greedy(tokens, **extra))
        self.names[name] = next(n for n in self.scheduler.requests if n.startswith(name))

    def step(self) -> None:
        if not self.scheduler.has_requests():
            return
        for output in self.engine.step():
            if output.finished:
                self.done[output.request_id] = output
        self.look()

    def until(self, what: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < until, "that does not come"
            self.step()
            time.sleep(0.0005)

    def finish(self, *names: str) -> list[list[int]]:
        self.until(lambda: all(name in self.done for name in names))
        return [list(self.done[name].outputs[0].token_ids) for name in names]

    def rest(self) -> None:
        """Until no request is left, and none whose blocks wait for a transfer."""
        self.until(lambda: not self.scheduler.has_requests())

    def receiving(self, *names: str) -> bool:
        """Whether transfers into the blocks of all these are under way."""
        transfers = get_kv_transfer_group().connector_worker._recving_transfers
        return all(transfers.get(self.names[name]) for name in names)

    def used(self) -> int:
        return sum(b.ref_cnt > 0 and not b.is_null for b in self.pool.blocks)


class Prefill:
    """The side that prefills: another process, which runs what it is sent, and steps its engine meanwhile."""

    def __init__(self, **options):
        self.pipe, theirs = processes.Pipe()
        self.process = processes.Process(target=self._serve, args=(theirs, options), daemon=True)
        self.process.start()
        theirs.close()
        assert self.answer() == "ready"

    def answer(self):
        assert self.pipe.poll(PATIENCE), "the prefill side does not answer"
        return self.pipe.recv()

    def ask(self, what: str, *args):
        self.pipe.send((what, args))
        return self.answer()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)

    @staticmethod
    def _serve(pipe, options) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also if it stands still
        try:
            side = Side(**options)
            calls = {
                "prefill": functools.partial(_prefill, side),
                "used": side.used,
                "memory": side.memory,
                "rest": side.rest,
                "forget": side.pool.reset_prefix_cache,
            }
            pipe.send("ready")
            while True:
                side.step()
                if pipe.poll(0.0005):
                    what, args = pipe.recv()
                    pipe.send(calls[what](*args))
        except BaseException:
            traceback.print_exc()
            os._exit(1)


def _prefill(side: Side, name: str, prompt: TokensPrompt) -> dict:
    """What the decode side needs to know to read its K and V."""
    side.add(name, prompt, {"do_remote_decode": True}, tokens=1)
    side.finish(name)
    return side.done[name].kv_transfer_params


@contextlib.contextmanager
def both(
    transports: str | None, prefill: dict | None = None, roles: tuple[str, str] = ROLES, **options
) -> Iterator[tuple[Prefill, Side]]:
    os.environ.pop("UCX_TLS", None)
    if transports is not None:
        os.environ["UCX_TLS"] = transports
    first = Prefill(role=roles[0], **(prefill or {}))
    try:
        yield first, Side(roles[1], **options)
    finally:
        first.kill()


def carry_over(prefill: Prefill, decode: Side, work: list[TokensPrompt], first: int = 0) -> list[list[int]]:
    """All of them at once; ``first`` numbers them."""
    names = [f"r{first + i}." for i in range(len(work))]
    for name, prompt in zip(names, work, strict=True):
        decode.add(name, prompt, prefill.ask("prefill", name, prompt))
    return decode.finish(*names)


def idle(prefill: Prefill | None, decode: Side) -> dict:
    """What both keep when nothing is under way any more."""
    decode.rest()
    report = {"memory": decode.memory(), "used": decode.used()}
    if prefill is not None:
        prefill.ask("rest")
        report |= {"prefill memory": prefill.ask("memory"), "prefill used": prefill.ask("used")}
    return report


WORK = prompts(12)


def alone(model_name: str):
    """What one engine says, without a connector."""
    engine = Engine(model_name)
    return {"tokens": engine.run(WORK, greedy(TOKENS)), "memory": engine.memory()}


def apart(transports: str | None, roles: tuple[str, str] = ROLES, **options):
    """Twice, so that the second time most of K and V is in the decode side's prefix cache."""
    with both(transports, options, roles, **options) as (prefill, decode):
        tokens, received = [], []
        for round in range(2):
            tokens.append(carry_over(prefill, decode, WORK, first=round * len(WORK)))
            received.append(decode.received)
        return {"tokens": tokens, "received": received, **idle(prefill, decode)}


def aborted():
    """In the middle: the prefill side stands still while its K and V are read."""
    with both("tcp", blocks=2 * SMALL) as (prefill, decode):
        tokens = carry_over(prefill, decode, WORK[:1])
        names = ["a.", "b."]
        asked = [prefill.ask("prefill", name, WORK[i + 1]) for i, name in enumerate(names)]
        prefill.signal(signal.SIGSTOP)
        for i, name in enumerate(names):
            decode.add(name, WORK[i + 1], asked[i])
        decode.until(lambda: decode.receiving(*names))
        used = [decode.used()]
        decode.engine.abort_request(["a."])
        for _ in range(20):
            decode.step()
        if ON_VTENSOR:  # others want all memory there is
            import vtensor

            memory = decode.pool.memory
            idle_bytes = (
                memory.pool.stats().budget - memory.arena.stats().pages_active * memory.pool.page_size
            )
            with vtensor.empty(
                0, grow_dim=0, capacity=idle_bytes, dtype=torch.uint8, pool=memory.pool
            ) as other:
                other.extend(idle_bytes).fill_(255)
                decode.look()
        used.append(decode.used())
        still = decode.receiving(*names)
        prefill.signal(signal.SIGCONT)
        tokens += decode.finish("b.")
        decode.rest()
        tokens += carry_over(prefill, decode, WORK[3:], first=3)
        return {"tokens": tokens, "in the middle": used, "still": still, **idle(prefill, decode)}


def killed_in_the_middle(policy: str):
    with both("tcp", policy=policy) as (prefill, decode):
        tokens = carry_over(prefill, decode, WORK[:1])
        asked = prefill.ask("prefill", "a.", WORK[1])
        prefill.signal(signal.SIGSTOP)
        decode.add("a.", WORK[1], asked)
        decode.until(lambda: decode.receiving("a."))
        prefill.kill()
        return {"tokens": tokens, **after_the_kill(decode)}


def killed_before(policy: str):
    """Between the prefill and the read."""
    with both(None, policy=policy) as (prefill, decode):
        tokens = carry_over(prefill, decode, WORK[:1])
        asked = prefill.ask("prefill", "a.", WORK[1])
        prefill.kill()
        decode.add("a.", WORK[1], asked)
        return {"tokens": tokens, **after_the_kill(decode)}


def after_the_kill(decode: Side) -> dict:
    start = time.monotonic()
    (cut,) = decode.finish("a.")
    ended = {"cut": cut, "reason": decode.done["a."].outputs[0].finish_reason}
    ended["seconds"] = time.monotonic() - start
    decode.add("b.", WORK[2])
    return {**ended, "after": decode.finish("b.")[0], **idle(None, decode)}


def nobody_reads(transports: str | None):
    """Until the lease is over, and the memory gone; then the decoding side does."""
    with both(transports, {"lease": 3}) as (prefill, decode):
        tokens = carry_over(prefill, decode, WORK[:1])
        asked = prefill.ask("prefill", "a.", WORK[1])
        used = [prefill.ask("used")]
        prefill.ask("rest")
        used.append(prefill.ask("used"))
        assert prefill.ask("forget")
        gone = prefill.ask("memory")
        decode.add("a.", WORK[1], asked)
        (late,) = decode.finish("a.")
        assert decode.pool.reset_prefix_cache()
        tokens += carry_over(prefill, decode, WORK[1:2], first=1)
        return {"tokens": tokens, "late": late, "leased": used, "gone": gone, **idle(prefill, decode)}


def another_connector():
    options = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    Engine(kv_transfer_config=options | {"kv_connector_extra_config": {"shared_storage_path": str(FOLDER)}})


SCENARIOS = {
    "alone": functools.partial(alone, "lively"),
    "hybrid_alone": functools.partial(alone, "lively_hybrid"),
    "by_default": functools.partial(apart, None),
    "over_tcp": functools.partial(apart, "tcp"),
    "over_what_is_named": functools.partial(apart, NAMED, ("kv_both", "kv_both")),
    "hybrid": functools.partial(apart, None, model_name="lively_hybrid"),
    "aborted": aborted,
    "killed_in_the_middle": functools.partial(killed_in_the_middle, "fail"),
    "killed_and_computed": functools.partial(killed_in_the_middle, "recompute"),
    "killed_before": functools.partial(killed_before, "recompute"),
    "nobody_reads": functools.partial(nobody_reads, None),
    "nobody_reads_over_tcp": functools.partial(nobody_reads, "tcp"),
    "another_connector": another_connector,
}


def run(name: str) -> None:
    """In a process of its own, which ends without what vLLM would do at exit."""
    faulthandler.dump_traceback_later(3 * PATIENCE)  # says where it stands before it is killed
    try:
        result = SCENARIOS[name]()
        (FOLDER / f"{sys.argv[1]}-transfer-{name}.json").write_text(json.dumps(result))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main() -> None:
    prepare_to_fork()
    for name in sys.argv[3:] or SCENARIOS:
        print(name, flush=True)
        child = processes.Process(target=run, args=(name,))
        child.start()
        child.join(4 * PATIENCE)
        if child.is_alive():
            child.kill()
        print(name, "ended with", child.exitcode, flush=True)


if __name__ == "__main__":
    main()
