"""The questions to a GPU run to their end without one: simulated libcuda, CPU tensors and threads stand in.

No figure is looked at but for its form. What a question must notice is shown to it: a call that waits, a
deadlock, a wrong page.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vtensor
from cuda_support import device, load_simulated_libcuda, needs_simcuda
from support import simcuda_control, simcuda_library

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from benchmarks.gpu import (  # noqa: E402
    QUESTIONS,
    Question,
    __main__,
    attention,
    beside_kernels,
    decode,
    graphs,
    report,
    stream_wait,
    waiting,
)
from benchmarks.gpu import pointers as pointers_question  # noqa: E402
from benchmarks.gpu import session as sessions  # noqa: E402
from benchmarks.gpu.device import StandIn  # noqa: E402
from benchmarks.gpu.driver import Pages  # noqa: E402
from benchmarks.gpu.session import OUT_OF_TIME, Session  # noqa: E402
from benchmarks.gpu.tensor_at import tensor_at  # noqa: E402

pytestmark = [needs_simcuda, pytest.mark.seconds(500)]
RESULTS = ROOT / "benchmarks" / "results"
NUMBERS = [question.number for question in QUESTIONS]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    # The vtensor that the tests use, also where another lies in the current folder.
    paths = [str(Path(vtensor.__file__).parents[1]), str(ROOT)]
    return {
        **os.environ,
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "VTENSOR_SIMCUDA": str(simcuda_library()),
    }


def ask(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=490,
    )


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory, environment) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("rehearsal")
    before = sorted(RESULTS.iterdir())
    finished = ask(environment, "--rehearsal", "--out", str(folder))
    assert sorted(RESULTS.iterdir()) == before, "a rehearsal writes no results"
    recording, as_json, as_text = sorted(folder.iterdir())
    document = json.loads(as_json.read_text())
    asked = {question["number"]: question for question in document["questions"]}
    return SimpleNamespace(
        finished=finished, document=document, asked=asked, text=as_text.read_text(), recording=recording
    )


def facts(rehearsal: SimpleNamespace, number: int) -> dict[str, object]:
    return {fact["name"]: fact["value"] for fact in rehearsal.asked[number]["facts"]}


def answers(rehearsal: SimpleNamespace, number: int) -> str:
    return "\n".join(rehearsal.asked[number]["answers"])


@pytest.mark.parametrize("number", NUMBERS)
def test_every_question_runs_to_its_end(rehearsal, number):
    question = rehearsal.asked[number]
    assert (question["status"], question["error"]) == ("answered", ""), rehearsal.finished.stdout
    assert question["answers"] and "WRONG" not in answers(rehearsal, number)
    for figure in question["figures"]:
        assert figure["name"] and figure["unit"] and figure["method"] and figure["n"] >= 1
        assert figure["p10"] <= figure["median"] <= figure["p90"] <= figure["p99"]


def test_a_rehearsal_says_that_it_is_one_wherever_it_writes(rehearsal):
    assert rehearsal.finished.returncode == 0, rehearsal.finished.stderr
    assert rehearsal.document["rehearsal"] is True
    assert "simulated" in rehearsal.document["machine"]["gpu"]
    assert report.REHEARSAL in rehearsal.text
    assert json.loads(rehearsal.recording.read_text().splitlines()[0])["rehearsal"] is True
    assert rehearsal.finished.stdout.count("rehearsal, no figure is a GPU's") == len(QUESTIONS)
    assert str(ROOT) not in json.dumps(rehearsal.document)


def test_the_text_answers_in_the_order_of_the_numbers(rehearsal):
    answered = rehearsal.text.partition("## Answers")[2].partition("\n## ")[0]
    at = [answered.index(f"{number}. ") for number in range(len(QUESTIONS))]
    assert at == sorted(at)
    for number in NUMBERS:
        for answer in rehearsal.asked[number]["answers"]:
            assert answer in answered


def test_every_call_is_timed_at_every_page_size(rehearsal):
    names = [figure["name"] for figure in rehearsal.asked[1]["figures"]]
    for size in (2, 4):
        for call in ("reserve", "create", "map", "set-access", "unmap, handle kept", "address-free"):
            assert f"{call}, {size} MiB" in names
    assert facts(rehearsal, 1)["VMM calls in a thread without a context"] == "all succeed"
    # The simulated driver hands out stale memory: a check that cannot see it would say zeros.
    assert facts(rehearsal, 1)["fresh handles after written ones were released"] == "2 of 2 not all zero"


def test_pages_are_mapped_while_kernels_run(rehearsal):
    found = facts(rehearsal, 2)
    assert found["runs of kernels with a wrong result"] == 0
    assert found["freshly mapped pages with wrong contents"] == 0
    assert int(answers(rehearsal, 2).partition("right: ")[2].split()[0]) > 0


def test_faults_end_their_own_process_and_not_the_parent(rehearsal):
    found = facts(rehearsal, 8)
    for case in ("a write through a read-only alias", "a read past the mapped end"):
        assert found[f"{case}: begun"] is True
        assert found[f"{case}: the process was ended by SIGSEGV; the parent"] == "lives"
    assert found["a write through a read-only alias: the alias reads"] == 7


def test_whole_storage_copies_die_and_a_clone_of_the_view_does_not(rehearsal):
    found = facts(rehearsal, 9)
    assert found["clone, which reads the view only: error"] == "none"
    for case in ("deepcopy", "torch.save"):
        assert found[f"{case}: begun"] is True and "SIGSEGV" in found[f"{case}: the process"]


def test_a_graph_sees_the_growth(rehearsal):
    found = facts(rehearsal, 7)
    assert found["replays"] > 5 and found["pages mapped between replays, times"] > 2
    assert found["replays with a wrong result"] == 0


def test_what_cannot_run_here_is_skipped_with_a_reason(rehearsal):
    skipped = {one["name"]: one["reason"] for one in rehearsal.asked[4]["skipped"]}
    assert "flash_attn" in skipped["FlashAttention 2"]
    assert any("torch SDPA" in figure["name"] for figure in rehearsal.asked[4]["figures"])


def test_which_addresses_kernels_may_be_given(rehearsal):
    believed = "CUDA_SUCCESS", "CUDA_ERROR_INVALID_VALUE"
    found = {name.rpartition("that is ")[2]: answer for name, answer in facts(rehearsal, 11).items()}
    assert found["mapped"] == found["mapped read-only"] == believed[0]
    assert found["mapped, and never given access"] == believed[0]
    assert found["reserved"] == found["reserved, and was mapped before"] == believed[1]


def test_what_shareable_handles_cost(rehearsal):
    found = facts(rehearsal, 12)
    assert found["cuMemCreate with a POSIX descriptor"] == "CUDA_SUCCESS"
    assert found["cuMemCreate with fabric"] == "CUDA_ERROR_NOT_SUPPORTED"
    names = [figure["name"] for figure in rehearsal.asked[12]["figures"]]
    assert "create, a POSIX descriptor / none" in names and "Refused here: fabric." in answers(rehearsal, 12)


# -- what a question must notice


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setenv("VTENSOR_SIMCUDA", str(simcuda_library()))
    load_simulated_libcuda()
    threads = torch.get_num_threads()
    session = Session(".calls", StandIn(), tmp_path / "findings", time.time() + 100)
    yield session
    torch.set_num_threads(threads)
    session.device.synchronize()
    session.driver.release_context()


def found_by(session: Session) -> dict[str, object]:
    return {f["name"]: f["value"] for f in sessions.read(session._emit) if f["kind"] == "fact"}


def test_a_call_that_waits_for_the_kernel_is_noticed(session):
    stream = session.device.stream()
    ends = []

    def load() -> None:
        session.device.spin(stream, 0.02)
        ends.append(session.device.mark(stream))

    def waits() -> int:
        for end in ends:
            end.synchronize()
        return 0

    calls = [waiting.Call("waits", waits, lambda: None), waiting.Call("returns", lambda: 0, lambda: None)]
    for call in calls:
        for _ in range(3):
            waiting.one_call(session, stream, load, call)
    assert waiting.report(session, "a kernel", calls) == ["waits (beside a kernel)"]
    assert found_by(session)["returns returned after the end of a kernel"] == "0 of 3"


def test_a_call_made_after_the_kernel_says_nothing(session):
    stream = session.device.stream()
    call = waiting.Call("late", lambda: 0, lambda: None)
    waiting.one_call(session, stream, lambda: None, call)
    assert (call.waited, call.too_late) == (0, 1)


def test_a_deadlock_is_noticed_and_ended(session, monkeypatch):
    monkeypatch.setattr(stream_wait, "WATCHDOG_SECONDS", 0.2)

    def maps_and_waits_for_all_streams(session, pages, other):
        stream_wait.map_page(session, pages)
        session.device.synchronize()

    monkeypatch.setitem(stream_wait.ACTIONS, "waits", maps_and_waits_for_all_streams)
    monkeypatch.setattr(Session, "rounds", lambda *_, **__: range(1))
    stream_wait.while_waiting(session, "waits")
    assert found_by(session)[stream_wait.RESCUED] is True


@pytest.mark.parametrize(("setting", "pointers"), [(0, 3), (1, 5), (2, 5), (3, 7)])
def test_a_driver_that_gives_other_pointers_is_noticed(session, setting, pointers):
    assert session.driver.retain_context() == 0
    with device(pointers=setting):
        given = pointers_question.answers_by_address(session.driver)
    assert sum(code == 0 for code in given.values()) == pointers
    assert given["mapped"] == 0 and given["no longer reserved"] != 0
    session.driver.release_context()


def test_a_case_that_was_killed_for_want_of_time_is_no_deadlock(session, monkeypatch):
    def end(session, case, seconds):
        rescued = [{"kind": "fact", "name": stream_wait.RESCUED, "value": True}] * (case == "rescued")
        return sessions.CaseEnd(None, rescued, "")

    monkeypatch.setattr(stream_wait, "CASES", {"killed": None, "rescued": None})
    monkeypatch.setattr(Session, "run_case", end)
    stream_wait.run(session)
    said = [f["text"] for f in sessions.read(session._emit) if f["kind"] == "answer"]
    assert said == [
        "These do not return while a stream waits for a flag: rescued.",
        "Could not be tried to its end: killed: the process hung, and was killed.",
    ]


def test_a_page_that_shows_another_is_noticed(session):
    def wrong(slots: dict[int, int]) -> int:
        with Pages(session.driver, beside_kernels.PAGE, 8, 8) as pages:
            for slot, handle in slots.items():
                assert pages.map(slot, pages.handles[handle]) == 0
            assert pages.set_access(0, 8) == 0
            return beside_kernels._wrong_pages(session, pages, 8, 7)

    right = {slot: slot for slot in range(8)}
    assert wrong(right) == 0
    # Slots 2 and 3 show one page, and so do 5 and 7, of which 7 ought to have a page of its own.
    assert wrong({**right, 3: 2}) == 1
    assert wrong({**right, 7: 5}) == 1


def test_what_a_capture_refused_is_not_given_back(session):
    def life(refused: str = "") -> list[str]:
        if refused:
            once = ctypes.c_uint64(0), ctypes.c_uint64(1)
            assert simcuda_control().simcuda_fail(refused.encode(), *once, 900) == 0
        answers: list[str] = []
        graphs.a_page_s_life(session.driver, answers)
        return [answer for answer in answers if not answer.endswith(" CUDA_SUCCESS")] + [str(len(answers))]

    unsupported = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert life() == ["7"]
    assert life("cuMemAddressReserve") == [f"reserve {unsupported}", "3"]
    assert life("cuMemCreate") == [f"create {unsupported}", "3"]
    assert life("cuMemMap") == [f"map {unsupported}", "5"]


def test_a_tensor_over_addresses_neither_reads_nor_owns_them(session):
    code, address = session.driver.reserve(2 << 20)
    assert code == 0
    t = tensor_at(address, (4, 8), torch.float32, torch.device("cpu"))
    assert (t.data_ptr(), t.shape, t.dtype) == (address, (4, 8), torch.float32)
    del t
    assert session.driver.free(address, 2 << 20) == 0


@pytest.mark.parametrize("with_statistics", [False, True])
def test_an_installed_attention_package_is_called_by_its_layout(monkeypatch, with_statistics):
    def flash_attn_func(q, k, v, causal):
        out = attention.sdpa(q, k, v, causal).transpose(1, 2)
        return (out, None) if with_statistics else out

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    q, k, v = torch.randn(1, 3, 8, 16), torch.randn(1, 3, 2, 16), torch.randn(1, 3, 2, 16)
    with attention.package("flash_attn") as attend:
        assert torch.equal(attend(q, k, v, True), attention.sdpa(q, k, v, True).transpose(1, 2))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_called_as_torch_has_it(monkeypatch):
    found = SimpleNamespace(find_spec=lambda name: object())
    monkeypatch.setattr(attention, "importlib", SimpleNamespace(util=found))
    compiler, asked = torch.compile, []

    def without_compiler(
        function, **options
    ):  # torch itself compiles parts of it, with a backend that needs none
        if "backend" in options:
            return compiler(function, **options)
        asked.append(options)
        return function

    monkeypatch.setattr(torch, "compile", without_compiler)
    q, k, v = torch.randn(1, 1, 8, 16), torch.randn(1, 128, 2, 16), torch.randn(1, 128, 2, 16)
    with attention.flex() as attend:
        torch.testing.assert_close(attend(q, k, v, False), attention.sdpa(q, k, v, False))
    assert asked == [{"dynamic": False}]


def test_the_mapper_is_measured_and_launches_are_leased(session, monkeypatch):
    leased = []

    @contextlib.contextmanager
    def lease(*tensors):
        leased.append(len(tensors))
        yield

    monkeypatch.setattr(vtensor, "lease", lease)
    decode.run(session)
    findings = sessions.read(session._emit)
    assert "VTensor with the mapper, batch 1, 1,024 positions" in {f.get("name") for f in findings}
    assert not [f for f in findings if f["kind"] == "skipped"]
    assert set(leased) == {2}, "K and V of one layer, and nothing for what is not ours"


# -- the runner

MODULES = {
    "dies": "def run(session):\n    session.fact('before', 1)\n    import ctypes; ctypes.string_at(0)\n",
    "hangs": "def run(session):\n    session.fact('before', 1)\n    import time; time.sleep(600)\n",
    "raises": "def run(session):\n    session.fact('before', 1)\n    raise ValueError('on purpose')\n",
    "answers": "def run(session):\n    session.answer('42')\n",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "seconds", "status", "error"),
    [
        ("dies", 60, "partial", "ended with -11"),
        ("hangs", 10, "partial", "ran past 10 s"),
        ("raises", 60, "partial", "ended with 1: ValueError: on purpose"),
        ("answers", 60, "answered", ""),
        ("there_is_none", 60, "failed", "ended with 1: ModuleNotFoundError"),
    ],
)
def test_what_was_found_outlives_the_process_that_found_it(
    tmp_path, monkeypatch, environment, module, seconds, status, error
):
    if module in MODULES:
        (tmp_path / f"{module}.py").write_text(MODULES[module])
    for name in ("PYTHONSAFEPATH", "VTENSOR_SIMCUDA"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([environment["PYTHONPATH"], str(tmp_path)]))
    result = report.Result(tmp_path / "out", {}, rehearsal=True)
    begun = time.monotonic()
    __main__.ask(Question(1, module, seconds, "?"), seconds, result)
    assert time.monotonic() - begun < seconds + 30
    (question,) = json.loads(result.paths[0].read_text())["questions"]
    assert question["status"] == status and question["error"].startswith(error)
    assert [fact["name"] for fact in question["facts"]] == (["before"] if status == "partial" else [])


@pytest.mark.slow
def test_what_was_found_is_kept_where_the_run_is_ended_from_outside(tmp_path, environment):
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearsal", "--only", "3", "--out", str(tmp_path)]
    runner = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert any("cuMemUnmap, nothing running" in line for line in runner.stdout)
        runner.terminate()
        runner.communicate(timeout=60)
    finally:
        runner.kill()
    (as_json,) = tmp_path.glob("*.json")
    (question,) = json.loads(as_json.read_text())["questions"]
    assert question["error"].startswith("ended from outside") and question["status"] == "partial"
    assert question["figures"]


def test_the_bounds_fit_two_calls():
    beside_build = [q.seconds for q in QUESTIONS if q.while_building]
    longest = ("attention", "decode", "layer_groups")
    later = [q.seconds for q in QUESTIONS if q.module[1:] in longest]
    soon = sum(q.seconds for q in QUESTIONS) - sum(later) - sum(beside_build)
    assert sum(beside_build) <= 180, "as long as the build"
    assert sum(beside_build) + soon <= 480 - 140, "with the tests of mappings and tensors"
    assert sum(later) <= 480 - 120, "with a build before them"


def test_what_can_be_asked_early_needs_no_vtensor():
    early = [question for question in QUESTIONS if question.while_building]
    assert early and not any(question.needs_vtensor for question in early)
    needs = [question.needs_vtensor for question in QUESTIONS]
    assert needs == sorted(needs), "what needs none comes first"


@pytest.mark.slow
def test_without_vtensor_the_others_are_asked(tmp_path, environment):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['vtensor'] = None\n")
    paths = [str(tmp_path), environment["PYTHONPATH"]]
    finished = ask(
        {**environment, "PYTHONPATH": os.pathsep.join(paths)},
        *("--rehearsal", "--only", "0,7", "--out", str(tmp_path / "out")),
    )
    (as_json,) = (tmp_path / "out").glob("*.json")
    recording, graphs = json.loads(as_json.read_text())["questions"]
    assert (finished.returncode, recording["status"], graphs["status"]) == (1, "answered", "not reached")
    assert "vtensor cannot be imported: ModuleNotFoundError" in graphs["error"]


def test_the_rest_is_added_to_what_was_asked_first(tmp_path, monkeypatch):
    folder = ["--rehearsal", "--out", str(tmp_path)]
    monkeypatch.setenv("VTENSOR_SIMCUDA", str(simcuda_library()))
    kept = {"case": "a", "call": "cuMemCreate", "answer": "CUDA_SUCCESS"}

    def answers(question, seconds, result):
        findings = [{"kind": "answer", "text": "42"}]
        findings += [{"kind": "call", **kept}] if question.while_building else []
        result.add(question.number, question.text, "answered", 1, findings)

    monkeypatch.setattr(__main__, "ask", answers)
    assert __main__.main(["--first", *folder]) == 0 and __main__.main(["--rest", *folder]) == 0
    (as_json,) = tmp_path.glob("*.json")
    asked = [question["number"] for question in json.loads(as_json.read_text())["questions"]]
    assert asked == [question.number for question in QUESTIONS]
    (recording,) = tmp_path.glob("*-driver.jsonl")
    lines = [json.loads(line) for line in recording.read_text().splitlines()[1:]]
    assert lines == [kept] * sum(question.while_building for question in QUESTIONS)


@pytest.mark.slow
def test_questions_that_the_time_does_not_reach_are_named(tmp_path, environment):
    finished = ask(environment, "--rehearsal", "--out", str(tmp_path), "--minutes", "1", "--spent", "58")
    (as_json,) = tmp_path.glob("*.json")
    document = json.loads(as_json.read_text())
    assert finished.returncode == 1
    assert [question["status"] for question in document["questions"]] == ["not reached"] * len(QUESTIONS)
    rest = ",".join(str(question.number) for question in QUESTIONS)
    assert f"in a second call: scripts/gpu.sh --only {rest}\n" in finished.stdout


def test_a_second_call_completes_the_first(tmp_path):
    done = report.Result(tmp_path, {"gpu": "X"}, rehearsal=False)
    for number, status, reason in ((1, "answered", "no package"), (4, "answered", OUT_OF_TIME)):
        done.add(number, "?", status, 1, [{"kind": "skipped", "name": "a", "reason": reason}])
    done.add(6, "?", "partial", 1, [])
    assert __main__.unfinished(done.document["questions"]) == [4, 6]
    done.save()
    report.Result(tmp_path, {"gpu": "X"}, rehearsal=False, only={6, 4}).save()
    names = sorted(path.name for path in tmp_path.glob("*.json"))
    assert names == [f"x-{done.document['date']}-only-4-6.json", f"x-{done.document['date']}.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rehearsal", "--out", str(RESULTS)], "measures nothing"),
        (["--only", "1,77"], "no question has the number 77"),
        ([], "torch finds no GPU here"),
    ],
)
def test_what_cannot_be_asked_is_refused(monkeypatch, capsys, arguments, message):
    if torch.cuda.is_available() and not arguments:
        pytest.skip("there is a GPU here")
    monkeypatch.setenv("VTENSOR_SIMCUDA", str(simcuda_library()))
    with pytest.raises(SystemExit):
        __main__.main(arguments)
    assert message in capsys.readouterr().err
