"""Replays: time is what the service model says, all managers are measured alike, and the command works."""

from __future__ import annotations

import io
import itertools
import json
import math
import sys

import pytest

from support import run_command
from test_replay_traces import TRACES, azure, mooncake
from vtensor import Pool, TimedOut
from vtensor._base.terminal import Progress
from vtensor.cli import main
from vtensor.replay import (
    Row,
    Server,
    ServiceModel,
    default_layer_group,
    model_shape,
    open_cache,
    read_trace,
    replay,
    simulate,
)
from vtensor.replay.managers import PagedCache, StaticCache
from vtensor.replay.policies import POLICIES, scale
from vtensor.replay.shapes import MODELS, ModelShape
from vtensor.serving import Plan, Request, SampleGroup, Scheduler, Status

LLAMA = MODELS["llama-3-8b"]
TOKEN = LLAMA.token_bytes
PAGE = 2 << 20
COMPARED = [name for name, policy in POLICIES.items() if not policy.opt_in]
SECOND_EACH = ServiceModel(step_seconds=1.0, tokens_per_second=math.inf, kv_bytes_per_second=math.inf)


def server(memory, max_len=8192, max_batch=64, **options):
    return Server(LLAMA, memory, max_batch, max_len, PAGE, 32, **options)


def served(rows, policies=tuple(COMPARED), memory=2 << 30, max_len=8192, **options):
    results = {}
    for policy in policies:
        with open_cache(policy, server(memory, max_len)) as cache:
            results[policy] = replay(policy, cache, rows, token_bytes=TOKEN, **options)
    return results


def real_rows(name, limit):
    if not (TRACES / name).exists():
        pytest.skip(f"{name} is not in ../shared/traces")
    return read_trace(TRACES / name, limit)


def test_time_is_what_the_service_model_says():
    """One slot: a prompt of 3000 tokens in two iterations, then the second request, which waited for it."""
    rows = [Row(0.0, 3000, 2), Row(1.0, 100, 1)]
    service = ServiceModel(step_seconds=1.0, tokens_per_second=1000, kv_bytes_per_second=TOKEN * 10_000)
    result = replay("static", StaticCache(4000, 1, 4000), rows, token_bytes=TOKEN, service=service)
    first = (1 + 2.048 + 0.2048) + (1 + 0.952 + 0.3) + (1 + 0.001 + 0.3001)
    second = 1 + 0.1 + 0.01
    assert result.seconds == pytest.approx(first + second)
    assert result.delays == pytest.approx([0, first - 1.0])
    assert (result.delay_p50, result.delay_p99) == pytest.approx((0.5 * (first - 1.0), 0.99 * (first - 1.0)))
    assert result.batch_mean == 1.0 and result.batch_peak == 1
    assert result.output_tokens == 3 and result.computed_tokens == 3101
    assert result.throughput == pytest.approx(3 / (first + second))
    assert result.ttfts == pytest.approx([(1 + 2.048 + 0.2048) + (1 + 0.952 + 0.3), first + second - 1.0])
    assert result.tpots == pytest.approx([1 + 0.001 + 0.3001]), "the second request has one token"
    assert result.ttft_p50 == pytest.approx(sum(result.ttfts) / 2)
    assert result.tpot_mean == result.tpot_p50 == result.tpot_p99 == result.tpots[0]


def test_a_request_waits_between_its_tokens_for_memory():
    """3 frames of 4 tokens: both prompts fit. The second request gives way after its first token, at 1 s. The
    first has its 6 tokens at 1 to 6 s, and the second its others at 7 and 8 s."""
    rows = [Row(0.0, 4, 6), Row(0.0, 4, 3)]

    def result(**promises):
        cache = PagedCache(3, 4, 64, frame_tokens=4)
        return replay("paged", cache, rows, token_bytes=TOKEN, service=SECOND_EACH, **promises)

    kept = result(slo_ttft=1.0, slo_tpot=3.5)
    assert (kept.recomputed, kept.seconds, kept.finished) == (1, 8.0, 2)
    assert kept.ttfts == [1.0, 1.0] and kept.tpots == [1.0, 3.5]
    assert (kept.tpot_mean, kept.tpot_p50, kept.tpot_p99) == (2.25, 2.25, 3.475)
    assert (kept.slo_ttft, kept.slo_tpot, kept.broken) == (1.0, 3.5, 0), "just kept"
    assert result(slo_ttft=1.0, slo_tpot=3.4).broken == 1
    assert result(slo_ttft=1.0, slo_tpot=0.9).broken == 2
    assert result(slo_ttft=0.9, slo_tpot=3.4).broken == 2, "each request once"


def test_copies_take_their_time_beside_the_computation():
    service = ServiceModel(step_seconds=2.0, copy_bytes_per_second=10.0)
    times = [service.seconds(Plan(), 1, {}, out, back) for out, back in ((0, 0), (20, 5), (50, 30), (30, 50))]
    assert times == [2.0, 2.0, 5.0, 5.0]


class Swaps(Scheduler):
    """Says of its second iteration that slot 1 came back, and that a request went whose slot was 0."""

    def plan(self):
        plan = super().plan()
        if self.stats.computed_tokens and self.stats.finished == 0:
            gone = SampleGroup(Request("gone", 1, 1), 99, status=Status.SWAPPED)
            gone.live[0].slot = 0
            again = SampleGroup(Request("again", 1, 1), 99, status=Status.WAITING)
            plan.preempted += [gone, again]
            plan.swapped_in.append(1)
        return plan


def test_swapped_requests_are_copied(monkeypatch):
    """Slots of 300 and 101 tokens at 100 tokens a second: the second iteration lasts for the longer."""
    monkeypatch.setattr(simulate, "Scheduler", Swaps)
    service = ServiceModel(1.0, math.inf, math.inf, copy_bytes_per_second=TOKEN * 100)
    for first, second in ((100, 299), (299, 100)):
        rows = [Row(0.0, first, 2), Row(0.0, second, 2)]
        result = replay("swaps", StaticCache(2000, 2, 1000), rows, token_bytes=TOKEN, service=service)
        assert result.seconds == pytest.approx(1.0 + 3.0)


def test_whole_prompts():
    """In one iteration each, even the longest, and while others decode."""
    shorts = [Row(0.0, 10, 9) for _ in range(3)]
    rows = [*shorts, Row(0.5, 8191, 1), Row(20.0, 3000, 2)]
    results = served(rows, ["vtensor", "whole"], memory=2 << 30, service=SECOND_EACH)
    pieces, whole = results["vtensor"], results["whole"]
    assert whole.ttfts == [1.0, 1.0, 1.0, 1.0, 1.5] and pieces.ttfts == [1.0, 1.0, 1.0, 2.0, 5.5]
    assert pieces.computed_tokens == whole.computed_tokens
    few = [Row(0.0, 3000, 1), Row(0.0, 3000, 1)]
    (more,) = served(few, ["whole"], max_len=3001, token_budget=6000, service=SECOND_EACH).values()
    assert more.ttfts == [1.0, 1.0], "a larger budget stays"


def test_the_mapper_has_the_time_of_each_iteration(monkeypatch):
    """And finds the requests queued that came during it. One that is not done is not waited for."""
    seen = []

    def wait_idle(pool, timeout):
        seen.append((timeout, queued[-1].planned is not None, queued[-1].unfinished))
        raise TimedOut("[Pool.wait_idle] timed out")

    queued = []

    def watched(*arguments, **options):
        queued.append(Scheduler(*arguments, **options))
        return queued[-1]

    monkeypatch.setattr(Pool, "wait_idle", wait_idle)
    monkeypatch.setattr(simulate, "Scheduler", watched)
    rows = [Row(0.0, 10, 2), Row(0.5, 10, 1)]
    (result,) = served(rows, ["vtensor"], service=SECOND_EACH).values()
    assert result.finished == 2 and seen == [(1.0, True, 2), (1.0, True, 2)]
    seen.clear()
    slow = ServiceModel(step_seconds=1e12)
    assert served(rows[:1], ["vtensor"], service=slow)["vtensor"].finished == 1
    assert [timeout for timeout, *_ in seen] == [60.0, 60.0], "no longer than that"


def test_the_mapper_maps_what_a_server_of_such_iterations_would_find_mapped():
    """All pages but those of the prompt, however many are decoded into."""
    calls = []
    for tokens in (40, 400):
        with open_cache("vtensor", server(1 << 30, lookahead=32)) as cache:
            rows = [Row(0.0, 1000, tokens)]
            result = replay(
                "vtensor", cache, rows, token_bytes=TOKEN, service=ServiceModel(step_seconds=30.0)
            )
        calls.append((result.calls_caller, result.calls_mapper))
    (few, some), (many, more) = calls
    assert few == many > 0 and more > some


def test_speed_and_idle_time():
    rows = [Row(0.0, 10, 1), Row(100.0, 10, 1)]
    for speed, end in ((1.0, 100.0), (10.0, 10.0)):
        result = replay("paged", PagedCache(64, 4, 64), rows, token_bytes=TOKEN, speed=speed)
        assert result.seconds == pytest.approx(end, abs=0.05) and result.delay_p99 == 0
        assert result.batch_mean == 1.0, "idle time counts for nothing"


def test_requests_too_long_are_failed_not_lost():
    rows = [Row(0.0, 100, 10), Row(0.0, 10, 5), Row(0.0, 60, 4)]
    result = replay("paged", PagedCache(3, 4, 64), rows, token_bytes=TOKEN)
    assert (result.requests, result.finished, result.failed, result.broken) == (3, 1, 2, 2)
    assert len(result.ttfts) == len(result.tpots) == 1


def test_azure_under_pressure():
    """Our memory holds what 16-token paging holds, within 3%; static slots a third of it at most."""
    rows = real_rows("azure_llm_2023_conv.csv", 250)
    longest = max(row.prompt_tokens + row.output_tokens for row in rows)
    results = served(rows, memory=5 << 30, max_len=longest, speed=60.0)
    for result in results.values():
        assert result.finished == result.admitted == 250 and result.failed == 0
    ours, paged, static, ideal = (results[name] for name in ("vtensor", "paged", "static", "ideal"))
    assert ours.batch_mean >= 0.97 * paged.batch_mean
    assert ours.batch_mean >= 3 * static.batch_mean
    assert paged.batch_mean <= ideal.batch_mean * 1.02
    assert 0 < paged.waste < ours.waste < 0.04 and static.waste > 1 and ideal.waste == 0
    assert ours.calls_caller > 0 and paged.calls_caller == paged.calls_mapper == 0
    assert static.delay_p99 > 1.5 * ours.delay_p99


def test_mooncake_prefixes():
    """In the sliced layout units of 32 tokens find what an ideal cache finds in units of 16, within 2%."""
    rows = real_rows("mooncake_conversation.jsonl", 40)
    results = served(rows, memory=64 << 30, max_len=131072)
    hits = {name: result.reused_tokens for name, result in results.items()}
    assert hits["ideal"] > 10_000 and hits["static"] == 0
    assert 0.98 * hits["ideal"] <= hits["vtensor"] <= hits["ideal"]
    assert 0.98 * hits["ideal"] <= hits["paged"] <= hits["ideal"]


def test_a_prompt_that_comes_again_is_not_computed_again(tmp_path):
    row = {"timestamp": 0, "input_length": 1000, "output_length": 2, "hash_ids": [1, 2]}
    rows = read_trace(mooncake(tmp_path, row, row | {"timestamp": 60_000}))
    for policy, unit in (("vtensor", 32), ("paged", 16), ("ideal", 16)):
        result = served(rows, [policy])[policy]
        assert result.reused_tokens == 999 // unit * unit
        assert result.computed_tokens == 2000 + 2 - result.reused_tokens
        assert result.hit_rate == result.reused_tokens / 2000


def test_calls_on_the_critical_path_take_their_time():
    rows = [Row(0.0, 1000, 50)]
    calls_that_last = ServiceModel(call_seconds={"mmap": 1.0})
    quick, slow = (served(rows, ["vtensor"], service=each)["vtensor"] for each in (None, calls_that_last))
    assert slow.calls_caller == quick.calls_caller
    assert slow.seconds - quick.seconds >= 1.0


def test_pages_are_those_of_the_real_sizes():
    """1000 tokens of Llama-3-8B, 65,536 bytes a token and range: 32 pages of 2 MiB in each of 2 ranges."""
    assert scale(LLAMA, PAGE) == 512 and default_layer_group(LLAMA, PAGE) == 32
    with open_cache("vtensor", server(1 << 30)) as cache:
        slot = cache.alloc()
        assert cache.step([1000 if i == slot else 0 for i in range(64)])
        stats = cache.stats()
        assert (stats.page_tokens, stats.ranges, stats.pages_used) == (32, 2, 64)
        assert cache.pool.stats().budget == (1 << 30) // 512
        assert stats.waste == pytest.approx(64 * PAGE / (1000 * TOKEN) - 1)


@pytest.mark.parametrize("name", MODELS)
def test_each_model_can_be_scaled(name):
    shape = MODELS[name]
    group = default_layer_group(shape, PAGE)
    assert shape.layers % group == 0
    with open_cache("vtensor", Server(shape, 1 << 30, 4, 4096, PAGE, group)) as cache:
        stats, factor = cache.stats(), scale(shape, PAGE)
        assert stats.page_size * factor == PAGE
        assert cache.step([cache.alloc() * 0 + 100, 0, 0, 0])
        assert cache.stats().nbytes_live * factor == 100 * shape.token_bytes


def test_sizes():
    assert model_shape("32x8x128") == LLAMA == ModelShape(32, 8, 128)
    assert LLAMA.token_bytes == 131_072


# ---------------------------------------------------------------------- the command


def few_rows(tmp_path):
    lines = [f"2023-11-16 18:15:{i:02}.5,{100 + 37 * i},{5 + i}" for i in range(10)]
    return azure(tmp_path, *lines)


def test_the_command_prints_a_table_and_draws_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plot = ("--plot", tmp_path / "replay.png")
    ran = run_command("replay", few_rows(tmp_path), "--memory", "1GiB", *plot).check()
    title, *lines = ran.out.splitlines()
    assert title == "trace.csv: 10 requests, 1x as fast, llama-3-8b in 1GiB, at most 256 at a time"
    assert [line.split() for line in lines[:3]] == [
        ["policy", *COMPARED],
        ["admitted", *["10"] * 4],
        ["failed", *["0"] * 4],
    ]
    figures = [line.split("  ")[0] for line in lines]
    latencies = ["ttft p50", "ttft p99", "tpot mean", "tpot p50", "tpot p99", "broken"]
    assert figures[figures.index("ttft p50") :][:6] == latencies
    assert max(map(len, lines)) <= 80, "lines that a terminal or a notebook would break"
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_writes_json(tmp_path):
    latencies = tmp_path / "latencies.json"
    latencies.write_text('{"mmap": 10}')
    ran = run_command(
        "replay", few_rows(tmp_path), "--policy", "paged", "--policy", "static", "--policy", "layerkv",
        "--slower", 0.2, "--json", "--limit", 5, "--latencies", latencies,
        "--memory", "1GiB", "--slo-ttft", 1e-3,
    ).check()  # fmt: skip
    told = json.loads(ran.out)
    assert [result["policy"] for result in told["results"]] == ["paged", "static", "layerkv"]
    assert all(result["finished"] == 5 for result in told["results"]) and told["settings"]["requests"] == 5
    assert told["settings"]["scaled_down_by"] == 512 and told["settings"]["memory"] == "1GiB"
    assert not {"samples", "delays", "ttfts", "tpots"} & set(told["results"][0])
    assert told["settings"]["slo_tpot"] == 0.2 and told["settings"]["copy_bandwidth"] == 25e9
    assert told["results"][0]["slo_ttft"] == 1e-3 and told["results"][0]["broken"] == 5
    assert 0 < told["results"][0]["ttft_p50"] <= told["results"][0]["ttft_p99"]
    names = ("tpot_mean", "tpot_p50", "tpot_p99")
    assert all(0 < result[name] < 0.2 for result in told["results"] for name in names)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--memory", "40GB"], "--memory is '40GB': write it as"),
        (["--memory", "0"], "--memory is 0 bytes: it must be at least 1"),
        (["--page-size", ""], "--page-size is '': write it as"),
        (["--model", "gpt"], "pass one of"),
        (["--max-batch", 0], "--max-batch is 0: it must be at least 1"),
        (["--speed", 0], "over 0"),
        (["--step-ms", 0], "--step-ms 0"),
        (["--token-budget", 3], "token_budget=3"),
        (["--policy", "static", "--memory", "1MiB"], "give it more"),
        (["--memory", "1MiB"], "1 MiB of memory hold no page of 2 MiB: give it more"),
        (["--latencies", "nowhere.json"], "nowhere.json cannot be read"),
        (["--tokens-per-second", "inf"], "--tokens-per-second inf"),
        (["--copy-bandwidth", 0], "--copy-bandwidth 0"),
        (["--slo-ttft", -1], "--slo-ttft -1.0"),
        (["--slo-tpot", "nan"], "--slo-tpot nan"),
        (["--max-batch", 10**9], "--max-batch is 1000000000: it must be at most 65,536"),
        (["--max-len", 1], "--max-len 1: the shortest request of the trace has "),
        (["--lookahead", -1], "--lookahead is -1: it must be at least 0"),
        (["--policy", "layerkv", "--slower", -1], "slower"),
        (["--lookahead", 10**6], "lookahead is 1000000"),
    ],
    ids=lambda given: " ".join(map(str, given))[:40] if isinstance(given, list) else "",
)
def test_wrong_arguments(tmp_path, capsys, arguments, what):
    assert run_here(few_rows(tmp_path), *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: [") and what in captured.err and captured.out == ""
    assert captured.err.count("\n") == 1


def run_here(*arguments):
    return main(["replay", *map(str, arguments)])


@pytest.mark.parametrize("name", ["none/replay.png", "replay.foo"])
def test_a_picture_that_cannot_be_written_costs_no_figures(tmp_path, capsys, name):
    pytest.importorskip("matplotlib")
    assert run_here(few_rows(tmp_path), "--policy", "ideal", "--plot", tmp_path / name) == 1
    shown = capsys.readouterr()
    assert "tokens/s" in shown.out
    assert f"error: [replay] {tmp_path / name} cannot be drawn" in shown.err


@pytest.mark.parametrize("name", ["$a_{$.csv", "\udcff.csv"])
def test_a_picture_names_the_trace_as_it_is(tmp_path, name):
    pytest.importorskip("matplotlib")
    trace = few_rows(tmp_path).rename(tmp_path / name)
    assert run_here(trace, "--policy", "ideal", "--plot", tmp_path / "replay.png") == 0


class Left(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


closed = io.StringIO()
closed.close()


@pytest.mark.parametrize("stderr", [None, closed, Left()], ids=["none", "closed", "left"])
def test_without_stderr_nothing_fails_or_is_mixed_into_the_output(capsys, monkeypatch, stderr):
    """There is none after ``2>&-``; to print(), None is standard output."""
    monkeypatch.setattr("time.monotonic", itertools.count(0, 20).__next__)
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress() as progress:
        progress("at 1")
    assert run_here("nowhere.csv") == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(capsys, monkeypatch, terminal):
    """After a second; on a terminal over itself, and gone at the end."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with Progress() as progress:
        for now[0] in (0.5, 1.5, 1.9, 2.6, 11.6):
            progress(f"at {now[0]}")
    shown = capsys.readouterr().err
    if terminal:
        assert shown == "\rat 1.5\x1b[K\rat 2.6\x1b[K\rat 11.6\x1b[K\r\x1b[K"
    else:
        assert shown == "at 1.5\nat 11.6\n"
