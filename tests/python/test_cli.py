"""The command line as its users start it: in a pipe, with wrong arguments, interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import vtensor
from support import eventually, run_command, run_process, sometimes
from vtensor import cli, testing
from vtensor._base import starting
from vtensor.cli import bench, main
from vtensor.cli.limits import limits
from vtensor.cli.selftest import self_test

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
}


def start(*arguments: str, cwd: Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "vtensor", *arguments],
        cwd=cwd,
        env=ENVIRONMENT | environment,
        # A shell that runs the tests in the background may have SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_version(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vtensor {vtensor.__version__}\n"


def test_info_as_json(capfd) -> None:
    assert main(["info", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)  # nothing else is on standard output
    assert report["ok"] and report["versions"]["vtensor"] == vtensor.__version__
    cpu = report["drivers"][0]
    assert cpu["device"] == "cpu" and cpu["found"] and cpu["page_size"] < cpu["budget"]
    assert cpu["granularity"] == os.sysconf("SC_PAGE_SIZE")
    names = [limit["name"] for limit in report["limits"]]
    for name in ("vm.max_map_count", "cgroup memory", "vm.overcommit_memory"):
        assert name in names
    assert [step["name"] for step in report["self_test"]["cpu"]] == ["reserve", "grow", "share", "free"]
    assert report["attention"][0]["version"].startswith("2.")


@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"]])
def test_info_has_what_a_report_needs_and_no_path_of_the_users(arguments: list[str], tmp_path: Path) -> None:
    home = tmp_path / "home" / "a-name"
    home.mkdir(parents=True)
    environment = ENVIRONMENT | {
        "HOME": str(home),
        "TMPDIR": str(home),
        "VTENSOR_SIMCUDA": str(home / "libsimcuda.so"),
        "VTENSOR_VLLM_BUDGET": "4GiB",
        "CUDA_VISIBLE_DEVICES": "",
    }
    shown = run_command(*arguments, cwd=home, environment=environment).check().out
    for word in ("CUDA of torch", "NVIDIA driver", "kernel", "libc", "cgroup", "VTENSOR_VLLM_BUDGET", "4GiB"):
        assert word in shown, shown
    assert "VTENSOR_SIMCUDA" in shown and "PATH" in shown and "vm.max_map_count" in shown
    for path in (str(tmp_path), sys.prefix, str(Path.home()), str(Path(vtensor.__file__).parent), "a-name"):
        assert path not in shown, path


@pytest.mark.parametrize("fail", [0, 1, 5])
def test_the_self_test_tells_a_refused_call(host, fail) -> None:
    with testing.fail_after(host, fail, refuse=1000):
        steps = self_test(host)
    assert [step.ok for step in steps] == [True] * (len(steps) - 1) + [False]
    assert "[host " in steps[-1].detail and ": " in steps[-1].detail, "the driver's own message"


def test_the_self_test_runs_on_every_driver(pool) -> None:
    steps = self_test(pool)
    assert [step.name for step in steps] == ["reserve", "grow", "share", "free"]
    assert all(step.ok for step in steps), steps


def test_a_failed_self_test_fails_the_command(monkeypatch, capsys) -> None:
    from vtensor.cli import info, selftest

    monkeypatch.setattr(info, "self_test", lambda pool: [selftest.Step("grow", False, "it moved", 0.0)])
    assert main(["info"]) == 1
    assert "WRONG" in capsys.readouterr().out
    assert main(["info", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_limits_read_the_kernels_files(tmp_path: Path) -> None:
    files = {
        "proc/sys/vm/max_map_count": "65530\n",
        "proc/sys/vm/overcommit_memory": "2\n",
        "proc/self/maps": "a\nb\nc\n",
        "proc/self/cgroup": "0::/user/app\n",
        "sys/fs/cgroup/user/memory.max": "1000000\n",
        "sys/fs/cgroup/user/memory.current": "400\n",
        "sys/fs/cgroup/user/app/memory.max": "max\n",
        "sys/fs/cgroup/user/app/memory.current": "300\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = {limit.name: limit for limit in limits(tmp_path)}
    maps = found["vm.max_map_count"]
    assert (maps.value, maps.used, maps.low) == (65530, 3, True) and "sysctl" in maps.remedy
    assert (found["cgroup memory"].value, found["cgroup memory"].used) == (1000000, 400)  # of an ancestor
    assert found["vm.overcommit_memory"].low and found["vm.overcommit_memory"].remedy

    (tmp_path / "proc/self/cgroup").write_text("9:cpu:/\n4:memory:/\n")
    old = tmp_path / "sys/fs/cgroup/memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # what v1 writes for no limit
    assert {limit.name: limit for limit in limits(tmp_path)}["cgroup memory"].value is None
    (old / "memory.limit_in_bytes").write_text("4096\n")
    assert {limit.name: limit for limit in limits(tmp_path)}["cgroup memory"].value == 4096


def test_info_says_that_private_copies_cannot_be_seen(tmp_path: Path, capsys) -> None:
    [pagemap] = [limit for limit in limits(tmp_path) if limit.name == "/proc/self/pagemap"]
    assert pagemap.low and "a fork counts" in pagemap.meaning and "/proc" in pagemap.remedy
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/pagemap").write_bytes(bytes(8))
    assert "/proc/self/pagemap" not in {limit.name for limit in limits(tmp_path)}


@pytest.mark.parametrize(
    "arguments, tells",
    [
        ([], "required: command"),
        (["dmeo"], "invalid choice: 'dmeo'"),
        (["info", "--jsno"], "vtensor info: error: unrecognized arguments: --jsno"),
        (["info", "more"], "unrecognized arguments: more"),
        (["--quick", "demo"], "unrecognized arguments"),
        (["demo", "--qick"], "unrecognized arguments: --qick"),
        (["bench", "--only", "nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_wrong_arguments(arguments: list[str], tells: str, capsys) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert tells in shown.err and "usage: python -m" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"], ["--help"]])
def test_a_closed_pipe_is_no_traceback(arguments: list[str], tmp_path: Path) -> None:
    closed = "import os; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)"
    ended = run_command(*arguments, before=closed, cwd=tmp_path)
    assert (ended.code, ended.err) == (141, "")


@pytest.mark.parametrize("arguments", ["info", "top --once"])
def test_no_standard_output_at_all(arguments: str, tmp_path: Path) -> None:
    command = f'exec "{sys.executable}" -m vtensor {arguments} >&-'
    ended = run_process("sh", "-c", command, cwd=tmp_path, timeout=60)
    assert (ended.code, ended.err) == (0, "")


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    ended = run_process("sh", "-c", f'exec "{sys.executable}" -m vtensor --help >/dev/full', timeout=60)
    assert (ended.code, ended.err) == (1, "error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_names_that_the_output_cannot_encode_are_escaped(encoding: str, tmp_path: Path) -> None:
    trace = tmp_path / "\xe4\udcff.csv"
    trace.write_text("event,id,bytes,stream\nalloc,1,512,0\n")
    command = [sys.executable, "-m", "vtensor", "replay-allocations", trace, "--allocator", "native"]
    environment = ENVIRONMENT | {"PYTHONIOENCODING": f"{encoding}:strict"}
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert "\xe4\udcff.csv".encode(encoding, "backslashreplace") in ended.stdout


def test_interrupted_while_torch_is_imported(tmp_path: Path) -> None:
    def is_interrupted() -> bool:
        process = start("info", cwd=tmp_path)
        maps = Path(f"/proc/{process.pid}/maps")
        eventually(lambda: process.poll() is not None or "libtorch" in maps.read_text(), 60)
        process.send_signal(signal.SIGINT)
        shown = process.communicate(timeout=60)
        if process.returncode == 0:  # it had come to its end
            return False
        assert (process.returncode, *shown) == (130, b"", b"stopped\n")
        return True

    assert sometimes(is_interrupted)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_as_the_interpreter_ends(tmp_path: Path) -> None:
    """Ctrl-C a second time, say."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, signal\natexit.register(lambda: signal.raise_signal(signal.SIGINT))\n"
    )
    process = start("--version", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    shown = process.communicate(timeout=60)
    assert (process.returncode, *shown) == (130, f"vtensor {vtensor.__version__}\n".encode(), b"stopped\n")


@pytest.mark.parametrize(
    "argv, orig_argv, is_command",
    [
        (["-m"], ["python", "-m", "vtensor"], True),
        (["-m", "info", "--json"], ["python", "-X", "dev", "-m", "vtensor", "info", "--json"], True),
        (["-m", "vtensor"], ["python", "-m", "other", "vtensor"], False),
        (["-c", "vtensor"], ["python", "-c", "import vtensor", "vtensor"], False),
        (["serve.py", "-m", "vtensor"], ["python", "serve.py", "-m", "vtensor"], False),
        ([], [], False),
    ],
)
def test_ctrl_c_is_changed_for_the_command_alone(monkeypatch, argv, orig_argv, is_command) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert starting._is_command() == is_command


def test_interrupted_bench_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    process = start("bench", "--only", "growth", "--json", cwd=tmp_path, TMPDIR=str(folder))
    assert process.stderr is not None
    seen = b""
    while b"growth ..." not in seen:
        seen += process.stderr.read1()
        assert process.poll() is None, seen
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.decode().rstrip().endswith("stopped") and b"Traceback" not in errors
    assert out == b"" and list(folder.iterdir()) == []


def test_bench_prints_its_results_as_json(capfd) -> None:
    assert main(["bench", "--quick", "--only", "extend", "--json"]) == 0
    shown = capfd.readouterr()
    result = json.loads(shown.out)
    assert [outcome["name"] for outcome in result["benchmarks"]] == ["extend"]
    assert "[1/1] extend" in shown.err


def test_bench_outside_a_checkout(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr(vtensor, "__file__", str(tmp_path / "vtensor" / "__init__.py"))
    assert bench.checkout() is None
    assert main(["bench", "--quick"]) == 1
    assert "checkout" in capsys.readouterr().err


@pytest.mark.parametrize("command, needs", [("bench", ["cli.bench"]), ("demo", [])])
def test_help_waits_for_no_imports_of_other_commands_or_models(command, needs, monkeypatch) -> None:
    imported = []
    own = cli._imported
    monkeypatch.setattr(cli, "_imported", lambda name: (imported.append(name), own(name))[1])
    assert main([command, "--help"]) == 0
    assert imported == needs


def test_demo_without_its_libraries(monkeypatch, capsys) -> None:
    for name in [name for name in sys.modules if name.startswith("vtensor.integrations.demo")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as where it is not installed
    assert main(["demo"]) == 1
    assert "pip install 'vtensor[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize("error", [vtensor.OutOfPages, OSError])
def test_an_error_is_one_line(monkeypatch, capfd, error) -> None:
    from vtensor.cli import info

    def refuse(pool):
        raise error("[Pool] no page: free some")

    monkeypatch.setattr(info, "self_test", refuse)
    assert main(["info"]) == 1
    print("more", flush=True)
    assert capfd.readouterr() == ("more\n", "error: [Pool] no page: free some\n")
