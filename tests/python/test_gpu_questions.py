"""The questions to a GPU run to their end without one: simulated libcuda, CPU tensors and threads stand in.

No figure is looked at but for its form. What a question must notice is shown to it: a call that waits, a
deadlock, a wrong page.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vtensor
from cuda_support import device, load_simulated_libcuda, needs_simcuda, with_libcuda
from support import ROOT, simcuda_control, simcuda_library

sys.path.append(str(ROOT))

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

import gpu_stand_in  # noqa: E402
from benchmarks import gpu  # noqa: E402
from benchmarks.gpu import OUT_OF_TIME, QUESTIONS, Pages, must  # noqa: E402

pytestmark = [needs_simcuda, pytest.mark.seconds(500)]
STAND_IN = Path(__file__).with_name("gpu_stand_in.py")


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = with_libcuda(folder)
    # The vtensor that the tests use, also where another lies in the current folder.
    environment |= {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": f"{Path(vtensor.__file__).parents[1]}:{STAND_IN.parent}",
    }
    command = [sys.executable, str(STAND_IN), "--out", str(folder / "out"), *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def found_in(folder: Path, number: int) -> list[dict]:
    (path,) = (folder / "out").glob("*.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found[0]["kind"] == "run" and "simulated" in found[0]["gpu"]
    return [one for one in found[1:] if one["question"] == number]


def facts(found: list[dict]) -> dict[str, object]:
    return {one["name"]: one["value"] for one in found if one["kind"] == "fact"}


@pytest.mark.slow
def test_every_question_runs_to_its_end_and_finds_what_the_simulation_is(tmp_path):
    output, _ = start(tmp_path).communicate(timeout=490)
    answers = {number: found_in(tmp_path, number) for number in QUESTIONS}
    facts_of = {number: facts(found) for number, found in answers.items()}
    for number, found in answers.items():
        assert found and not [one for one in found if one["kind"] == "error"], output
        assert "WRONG" not in str(facts_of[number])
        for figure in [one for one in found if one["kind"] == "figure"]:
            assert figure["name"] and figure["unit"] and figure["method"] and figure["n"] >= 1
            assert figure["p10"] <= figure["median"] <= figure["p90"] <= figure["p99"]
        assert f"\n{number}. {QUESTIONS[number].text} (at most" in output
    life = [one for one in answers[0] if one.get("case") == "a page's life"]
    assert len(life) == 9 and {one["answer"] for one in life} == {"CUDA_SUCCESS"}
    by_call, mapped, faulted = facts_of[1], facts_of[2], facts_of[8]
    figures = {one["name"] for found in answers.values() for one in found if one["kind"] == "figure"}
    for call in ("reserve", "create", "map", "set-access", "unmap, handle kept", "address-free"):
        assert {f"{call}, 2 MiB", f"{call}, 4 MiB"} <= figures
    assert by_call["VMM calls in a thread without a context"].count("CUDA_SUCCESS") == 7
    # The simulated driver hands out stale memory: a check that cannot see it would say zeros.
    assert by_call["fresh handles after written ones were released"] == "2 of 2 not all zero"
    assert {v for name, v in mapped.items() if "wrong result" in name} == {0}
    assert all(str(v).startswith("0 of ") for name, v in mapped.items() if "wrong contents" in name)
    for case in ("write through read only", "read past end"):
        assert faulted[f"{case}: begun"] is True and faulted[f"{case}: the parent's error"] == "none"
        assert faulted[f"{case}: the process"] == "was ended by SIGSEGV"
    assert faulted["write through read only: the alias reads"] == 7
    copied = facts_of[9]
    assert copied["clone, which reads the view only: error"] == "none"
    for case in ("deepcopy", "torch.save"):
        assert copied[f"{case}: begun"] is True and "SIGSEGV" in copied[f"{case}: the process"]
    graph = facts_of[7]
    assert graph["replays"] > 5 and graph["pages mapped between replays, times"] > 2
    assert [v for name, v in graph.items() if "wrong result" in name] == [0]
    skipped = {one["name"]: one["reason"] for one in answers[4] if one["kind"] == "skipped"}
    assert "flash_attn" in skipped["FlashAttention 2"] and "create, a POSIX descriptor / none" in figures
    assert facts_of[12]["cuMemCreate with fabric"] == "CUDA_ERROR_NOT_SUPPORTED"
    assert set(facts_of[10].values()) == {"no deadlock, 0 wrong elements"}
    shared = {"how pages go to another process": "descriptors", "a copy read there is equal": True}
    assert facts_of[13] == shared
    assert {"handing 8 MiB to a waiting process", "sync, nothing new", "sync, one new page"} <= figures


# -- what a question must notice


@pytest.fixture
def session(monkeypatch):
    """What the questions find in this process."""
    monkeypatch.setenv("VTENSOR_SIMCUDA", str(simcuda_library()))
    load_simulated_libcuda()
    for name, stand_in in {**gpu_stand_in.STAND_INS, "deadline": time.time() + 100}.items():
        monkeypatch.setattr(gpu, name, stand_in)
    found: list[dict] = []
    monkeypatch.setattr(gpu, "find", lambda kind, **finding: found.append({"kind": kind, **finding}))
    for cached in (gpu.retain_context, gpu.properties, gpu.has_rdma):
        cached.cache_clear()
    assert gpu.granularity()
    yield found
    gpu_stand_in.synchronize()
    must(gpu.cuda.cuCtxSetCurrent(gpu.cuda.CUcontext(0)))
    must(gpu.cuda.cuDevicePrimaryCtxRelease(0))
    simcuda_control().simcuda_reset()  # a question's process ends with what it mapped


def test_a_call_that_waits_for_the_kernel_is_noticed(session):
    stream, ends = gpu.new_stream(), []

    def load() -> None:
        gpu.spin(stream, 0.02)
        ends.append(gpu.mark(stream))

    def waits() -> tuple[int]:
        for end in ends:
            end.synchronize()
        return (0,)

    def of(call, load=load) -> list[bool | None]:
        return [gpu.waited(stream, load, call)[1] for _ in range(3)]

    assert gpu.verdict(of(waits)) == "3 of 3: it WAITS"
    assert gpu.verdict(of(lambda: (0,))) == "0 of 3: it does not wait"
    assert of(waits, lambda: None) == [None] * 3, "made after the end of the kernel"


def test_a_deadlock_is_noticed_and_ended(session, monkeypatch):
    monkeypatch.setattr(gpu, "WATCHDOG_SECONDS", 0.2)

    def maps_and_waits_for_all_streams(pages: Pages) -> tuple[int]:
        pages.put(6, 0)
        gpu.synchronize()
        return pages.unmap(6)

    def calls_on(pages: Pages):
        return {"waits": (lambda: maps_and_waits_for_all_streams(pages), bool)}

    monkeypatch.setattr(gpu, "calls_on", calls_on)
    monkeypatch.setattr(gpu, "rounds", lambda *_, **__: range(1))
    gpu.while_waiting("waits")
    assert gpu.RESCUED in facts(session)


@pytest.mark.parametrize(("setting", "pointers"), [(0, 3), (1, 5), (2, 5), (3, 7)])
def test_a_driver_that_gives_other_pointers_is_noticed(session, setting, pointers):
    with device(pointers=setting):
        given = gpu.pointer_answers()
    assert sum(answer[0] == 0 for answer in given.values()) == pointers
    assert given["mapped"][0] == 0 and given["no longer reserved"][0] != 0


def test_a_page_that_shows_another_is_noticed(session):
    def wrong(slots: dict[int, int]) -> int:
        with Pages(8, 8) as pages:
            for slot, handle in slots.items():
                pages.put(slot, handle)
            return gpu.wrong_pages(pages, 8)

    right = {slot: slot for slot in range(8)}
    assert wrong(right) == 0
    assert wrong({**right, 3: 2}) == 1, "slots 2 and 3 show one page"


def test_what_a_capture_refused_is_not_given_back(session):
    def life(refused: str = "") -> list[str]:
        if refused:
            once = ctypes.c_uint64(0), ctypes.c_uint64(1)
            assert simcuda_control().simcuda_fail(refused.encode(), *once, 900) == 0
        answers = gpu.page_s_life()
        return [answer for answer in answers if not answer.endswith(" CUDA_SUCCESS")] + [str(len(answers))]

    unsupported = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert life() == ["7"]
    assert life("cuMemAddressReserve") == [f"reserve {unsupported}", "3"]
    assert life("cuMemCreate") == [f"create {unsupported}", "3"]
    assert life("cuMemMap") == [f"map {unsupported}", "5"]


@pytest.mark.parametrize("with_statistics", [False, True])
def test_an_installed_attention_package_is_called_by_its_layout(monkeypatch, with_statistics):
    def flash_attn_func(q, k, v, causal):
        out = gpu.sdpa(q, k, v, causal).transpose(1, 2)
        return (out, None) if with_statistics else out

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    q, k, v = torch.randn(1, 3, 8, 16), torch.randn(1, 3, 2, 16), torch.randn(1, 3, 2, 16)
    attend = gpu.package("flash_attn")
    assert torch.equal(attend(q, k, v, True), gpu.sdpa(q, k, v, True).transpose(1, 2))


def test_the_worker_is_measured_and_launches_are_leased(session, monkeypatch):
    leased = []

    @contextlib.contextmanager
    def lease(tensors):
        leased.append(len(tensors))
        yield

    monkeypatch.setattr(vtensor, "lease", lease)
    gpu.decode()
    names = {one.get("name") for one in session}
    assert "step of VTensor with the worker, batch 1, 1,024 positions" in names
    assert not [one for one in session if one["kind"] == "skipped"]
    assert set(leased) == {2}, "K and V of one layer, and nothing for what is not ours"


# -- the runner


@pytest.mark.parametrize(
    ("work", "seconds", "end"),
    [
        (lambda: ctypes.string_at(0), 60, "was ended by SIGSEGV"),
        (lambda: time.sleep(600), 1, "hung, and was killed"),
        (lambda: ctypes.pythonapi.sleep(600), 1, "hung, and was killed"),  # it keeps the interpreter's lock
        (lambda: int("x"), 60, "exited with 1 (ValueError: invalid literal for int() with base 10: 'x')"),
        (lambda: None, 60, "exited with 0"),
    ],
)
def test_what_was_found_outlives_the_process_that_found_it(work, seconds, end):
    begun = time.monotonic()
    found = list(gpu.apart(lambda: (gpu.fact("before", 1), work()), seconds))
    assert time.monotonic() - begun < 30
    assert facts(found) == {"before": 1}
    assert found[-1] == {"kind": "end", "text": end}
    assert [one["text"] for one in found if one["kind"] == "error"] == re.findall(r"\((.*)\)$", end)


def test_what_was_found_is_kept_where_the_run_is_ended_from_outside(tmp_path):
    runner = start(tmp_path, "--only", "3")
    try:
        assert any("reserve, beside" in line for line in runner.stdout)
        runner.terminate()
        runner.communicate(timeout=60)
    finally:
        runner.kill()
    assert [one for one in found_in(tmp_path, 3) if one["kind"] == "figure"]


def test_the_bounds_fit_the_time():
    early = [question for question in QUESTIONS.values() if question.while_building]
    assert sum(question.seconds for question in early) <= 180, "as long as the build"
    without = "import sys; sys.modules['vtensor'] = None; from benchmarks import gpu"
    subprocess.run([sys.executable, "-c", without], cwd=ROOT, check=True, timeout=100)
    for name in ("record", "faults", "pointers", "play_cases", "fault"):
        assert "vtensor" not in inspect.getsource(getattr(gpu, name)), "they need no vtensor"
    short = [q for q in QUESTIONS.values() if not q.while_building and q.seconds < 60]
    assert sum(question.seconds for question in short) <= 480 - 140, "with the tests of mappings and tensors"


def test_a_question_that_the_time_does_not_reach_is_named_with_the_call_that_asks_it(
    tmp_path, monkeypatch, capsys
):
    def apart(work, seconds):
        if work is gpu.describe:
            yield {"kind": "run", "gpu": "none"}
        if work is QUESTIONS[5].ask:
            yield {"kind": "skipped", "name": "a", "reason": OUT_OF_TIME}
        yield {"kind": "end", "text": f"exited with {int(work is QUESTIONS[3].ask)}"}

    monkeypatch.setattr(gpu, "apart", apart)
    monkeypatch.setattr(gpu, "deadline", gpu.deadline)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    assert gpu.main(["--out", str(tmp_path)]) == 1
    assert "in a second call: scripts/gpu.sh --only 3,5\n" in capsys.readouterr().out
    assert gpu.main(["--out", str(tmp_path), "--only", "4,5,6"]) == 0
    assert "scripts/gpu.sh --only 5\n" in capsys.readouterr().out
    assert gpu.main(["--out", str(tmp_path), "--only", "4,6", "--minutes", "0"]) == 1
    (path,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines].count("run") == 3, "a call adds to what an earlier one found"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--only", "1,77"], "no question has the number 77"), ([], "torch finds no GPU here")],
)
def test_what_cannot_be_asked_is_refused(capsys, arguments, message):
    if torch.cuda.is_available() and not arguments:
        pytest.skip("there is a GPU here")
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert message in capsys.readouterr().err
