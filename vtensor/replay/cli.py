"""``python -m vtensor replay TRACE``: a trace with each memory manager, as a table, JSON and a picture."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vtensor._base.arguments import byte_count, integer
from vtensor._base.terminal import Progress
from vtensor.errors import InvalidArgument
from vtensor.replay.policies import POLICIES, Server, default_layer_group, open_cache, scale
from vtensor.replay.report import picture, table, to_json
from vtensor.replay.shapes import MODELS, model_shape
from vtensor.replay.simulate import SLO_TPOT, SLO_TTFT, ServiceModel, replay
from vtensor.replay.traces import Row, read_trace

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_LOOKAHEAD = 32
_MOST_AT_A_TIME = 2**16
_MOST = 2**31 - 1

_DESCRIPTION = """Serves a trace of real requests with each of several memory managers in the same amount of
memory, with the same scheduler and the same model of the device, in simulated time. vtensor maps real pages.
Its page size and token size are scaled down by one factor, so all counts are those of the real sizes."""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "replay", help="serve a trace with several memory managers", description=_DESCRIPTION
    )
    service = ServiceModel()
    parser.add_argument("trace", metavar="TRACE", help="an Azure .csv or a Mooncake .jsonl file")
    parser.add_argument(
        "--policy",
        action="append",
        choices=list(POLICIES),
        help=f"may be given several times (default: {', '.join(_by_default())})",
    )
    parser.add_argument(
        "--driver",
        choices=("host", "simulated"),
        default="host",
        help="mmap, or the simulated libcuda that $VTENSOR_SIMCUDA names; vtensor only",
    )
    copies = "bytes a second of copies to host memory, and of copies from it"
    lookahead = f"(default: {_LOOKAHEAD}, or --max-len below it)"
    slower = "the part by which waits in host memory may lengthen the mean time per token; layerkv only"
    latencies = "JSON object from a driver call to its microseconds, which lengthen iterations"
    options: list[tuple[str, type, object, str | None, str]] = [
        ("--model", str, "llama-3-8b", None, f"{', '.join(MODELS)}, or LAYERSxKV_HEADSxHEAD_DIM"),
        ("--memory", str, "40GiB", None, "for K and V"),
        ("--limit", int, None, "ROWS", "the trace's first rows only"),
        ("--speed", float, 1.0, None, "requests come this many times faster"),
        ("--max-batch", int, 256, None, "the most requests at a time"),
        ("--max-len", int, None, None, "the most tokens of a request (default: the longest of the trace)"),
        ("--token-budget", int, 2048, None, "tokens of an iteration"),
        ("--page-size", str, "2MiB", None, "of the driver; vtensor only"),
        ("--layer-group", int, None, None, "layers in a page; vtensor only (default: as many as fit)"),
        ("--lookahead", int, None, None, f"tokens kept ready by the mapper; vtensor only {lookahead}"),
        ("--step-ms", float, service.step_seconds * 1e3, None, "fixed time of an iteration"),
        ("--tokens-per-second", float, service.tokens_per_second, None, "tokens computed a second"),
        ("--kv-bandwidth", float, service.kv_bytes_per_second, None, "bytes of K and V read a second"),
        ("--copy-bandwidth", float, service.copy_bytes_per_second, "BYTES_PER_SECOND", copies),
        ("--slower", float, 0.05, None, slower),
        ("--slo-ttft", float, SLO_TTFT, "SECONDS", "the promise: seconds to the first token"),
        ("--slo-tpot", float, SLO_TPOT, "SECONDS", "the promise: seconds for each later token"),
        ("--latencies", str, None, "FILE", latencies),
        ("--plot", str, None, "FILE", "also draw a picture (.png, .svg, ...)"),
    ]
    for name, kind, default, metavar, what in options:
        shown = "" if default is None else " (default: %(default)s)"
        parser.add_argument(name, type=kind, default=default, metavar=metavar, help=what + shown)
    parser.add_argument("--json", action="store_true", help="JSON instead of the table")


def main(arguments: argparse.Namespace) -> None:
    rows = read_trace(arguments.trace, _at_least("--limit", arguments.limit, 1))
    server = _server(arguments, rows)
    if server.driver == "simulated":  # read when the library is loaded; by default that of a device
        os.environ.setdefault(
            "SIMCUDA_GRANULARITY", str(server.page_size // scale(server.shape, server.page_size))
        )
    service = ServiceModel(
        step_seconds=_over_zero("--step-ms", arguments.step_ms) / 1e3,
        tokens_per_second=_over_zero("--tokens-per-second", arguments.tokens_per_second),
        kv_bytes_per_second=_over_zero("--kv-bandwidth", arguments.kv_bandwidth),
        copy_bytes_per_second=_over_zero("--copy-bandwidth", arguments.copy_bandwidth),
        call_seconds=_latencies(arguments.latencies),
    )
    results = []
    for policy in arguments.policy or _by_default():
        with Progress() as progress, open_cache(policy, server) as cache:
            results.append(
                replay(
                    policy,
                    cache,
                    rows,
                    token_bytes=server.shape.token_bytes,
                    service=service,
                    speed=_over_zero("--speed", arguments.speed),
                    token_budget=arguments.token_budget,
                    slo_ttft=_over_zero("--slo-ttft", arguments.slo_ttft),
                    slo_tpot=_over_zero("--slo-tpot", arguments.slo_tpot),
                    slower=arguments.slower,
                    progress=progress,
                )
            )
    settings = _settings(arguments, server, rows)
    if arguments.json:
        print(to_json(settings, results))
    else:
        print(_headline(arguments, server, rows))
        print(table(results))
    if arguments.plot:  # last: without a picture the figures stay
        picture(results, arguments.plot, title=_headline(arguments, server, rows))


def _server(arguments: argparse.Namespace, rows: list[Row]) -> Server:
    shape = model_shape(arguments.model)
    page_size = byte_count("replay", "--page-size", arguments.page_size, 1)
    max_len = _at_least("--max-len", arguments.max_len, 1)
    tokens = [row.prompt_tokens + row.output_tokens for row in rows]
    if max_len is None:
        max_len = max(tokens)
    if max_len < min(tokens):
        raise InvalidArgument(
            f"[replay] --max-len {max_len}: the shortest request of the trace has {min(tokens):,} tokens: "
            "raise it"
        )
    lookahead = _at_least("--lookahead", arguments.lookahead, 0)
    return Server(
        shape=shape,
        memory=byte_count("replay", "--memory", arguments.memory, 1),
        max_batch=integer("replay", "--max-batch", arguments.max_batch, 1, _MOST_AT_A_TIME),
        max_len=max_len,
        page_size=page_size,
        layer_group=_at_least("--layer-group", arguments.layer_group, 1)
        or default_layer_group(shape, page_size),
        lookahead=min(_LOOKAHEAD, max_len) if lookahead is None else lookahead,
        driver=arguments.driver,
    )


def _by_default() -> list[str]:
    return [name for name, policy in POLICIES.items() if not policy.opt_in]


def _headline(arguments: argparse.Namespace, server: Server, rows: list[Row]) -> str:
    return (
        f"{Path(arguments.trace).name}: {len(rows):,} requests, {arguments.speed:g}x as fast, "
        f"{arguments.model} in {arguments.memory}, at most {server.max_batch} at a time"
    )


def _settings(arguments: argparse.Namespace, server: Server, rows: list[Row]) -> dict[str, object]:
    kept = {name: value for name, value in vars(arguments).items() if name not in ("json", "plot")}
    kept = {name: value for name, value in kept.items() if isinstance(value, (str, int, float, type(None)))}
    return kept | {
        "requests": len(rows),
        "max_len": server.max_len,
        "layer_group": server.layer_group,
        "lookahead": server.lookahead,
        "tokens_in_memory": server.tokens,
        "scaled_down_by": scale(server.shape, server.page_size),
    }


def _latencies(path: str | None) -> dict[str, float]:
    if path is None:
        return {}
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"[replay] --latencies {path} cannot be read: {error}") from error
    if not isinstance(given, dict) or not all(
        type(us) in (int, float) and 0 <= us <= _MOST for us in given.values()
    ):
        raise InvalidArgument(f'[replay] --latencies {path}: write {{"cuMemMap": 2.5, ...}}, in microseconds')
    return {name: us / 1e6 for name, us in given.items()}


def _at_least(name: str, number: int | None, least: int) -> int | None:
    return None if number is None else integer("replay", name, number, least, _MOST)


def _over_zero(name: str, number: float) -> float:
    if not (number > 0 and math.isfinite(number)):
        raise InvalidArgument(f"[replay] {name} {number}: it must be over 0, and a number")
    return number
