"""`import vtensor`: fast, touches no GPU, changes nothing in torch; and the wheel it comes from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from vtensor.integrations.vllm import TESTED

from support import ROOT, Finished, import_beside, run_process, run_program
from vtensor import _core

IMPORT_LIMIT_MS = 60  # of CPU time, that `import vtensor` adds to `import torch`
IMPORT_RUNS = 5  # other work on the machine only adds: one quiet run is enough


def test_import_changes_nothing_but_itself(tmp_path: Path) -> None:
    """It loads no libcuda, brings in nothing but torch, and patches nothing there."""
    # Every attribute of every loaded torch module and of every class they define, by identity. What
    # torch's own submodules add to their parents when they are first imported is torch's, not ours.
    code = """
import sys, types
import torch

def fingerprint():
    seen = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "torch" or module is None:
            continue
        for name, value in list(vars(module).items()):
            seen[module_name, name] = value
            if isinstance(value, type) and value.__module__.split(".")[0] == "torch":
                for key, member in list(vars(value).items()):
                    seen[value.__module__, value.__qualname__, key] = member
    return seen

mapped = open("/proc/self/maps").read()
before, modules = fingerprint(), set(sys.modules)
import vtensor
after = fingerprint()

now = open("/proc/self/maps").read()
assert "libcuda.so" in mapped or "libcuda.so" not in now, "import vtensor loaded libcuda"
assert "/_core." in now
missing = object()
changed = [k for k, v in before.items() if after.get(k, missing) is not v]
new_modules = set(sys.modules) - modules
added = [
    k for k, v in after.items()
    if k not in before and k[0] not in new_modules and not isinstance(v, types.ModuleType)
]
assert len(before) > 10_000, len(before)
assert not changed and not added, (changed, added)
new = {name.split(".")[0] for name in new_modules} - set(sys.stdlib_module_names)
assert new <= {"vtensor", "torch"}, new
commands = [name for name in new_modules if name.startswith(("vtensor.cli", "vtensor.testing", "argparse"))]
assert not commands, commands
"""
    run_program(code, cwd=tmp_path).check()


def check_wheel(*files: object) -> Finished:
    return run_process(sys.executable, ROOT / "scripts/check_wheel.py", *files)


def test_the_extension_links_no_cuda_and_no_torch_and_lets_out_three_symbols() -> None:
    check_wheel(_core.__file__).check()


def test_the_check_of_a_wheel_sees_what_is_wrong(tmp_path: Path) -> None:
    source = tmp_path / "wrong.c"
    source.write_text(
        "int cuMemMap(void); int missing(void); int more(void) { return cuMemMap() + missing(); }"
    )
    cuda, wrong = tmp_path / "libcuda.so", tmp_path / "_core.so"
    (tmp_path / "cuda.c").write_text("int cuMemMap(void) { return 0; }")
    compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o"]
    subprocess.run([*compiler, cuda, tmp_path / "cuda.c", "-Wl,-soname,libcuda.so.1"], check=True)
    subprocess.run([*compiler, wrong, source, cuda], check=True)
    checked = check_wheel(wrong)
    assert checked.code == 1
    for word in (
        "links libcuda",
        "lets out more",
        "not let out PyInit__core",
        "linked with has cuMemMap, missing",
    ):
        assert word in checked.out


def test_import_works_where_nothing_but_torch_is_installed(tmp_path: Path) -> None:
    """Nor does a pool, a tensor or a cache need more; torch itself imports numpy where there is one."""
    run_program(
        """
import sys
import torch
for name in ("numpy", "matplotlib", "IPython", "transformers", "vllm", "hypothesis", "pytest"):
    for loaded in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[loaded]
    sys.modules[name] = None  # an import of it raises
import vtensor
t = vtensor.zeros(3, 4, grow_dim=0, capacity=99)
t.append(torch.ones(1, 4))
assert t.sum() == 4 and repr(t)
""",
        cwd=tmp_path,
    ).check()


def test_each_extra_names_what_it_is_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"plot", "transformers", "vllm", "notebooks"} <= set(extras)
    assert extras["vllm"] == [f"vllm=={release}" for release in TESTED]


def test_a_wheel_for_a_later_c_library_is_seen(tmp_path: Path) -> None:
    names = [f"vtensor-1-cp312-abi3-manylinux_2_{minor}_x86_64.whl" for minor in (28, 34)]
    for name in names:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.write(_core.__file__, "vtensor/_core.abi3.so")
    checked = check_wheel(*(tmp_path / name for name in names))
    assert checked.out == f"{names[1]}: not for glibc 2.28\n"


@pytest.mark.parametrize("command", [["-c", "import vtensor"], ["-m", "vtensor", "info"]])
def test_sources_without_the_extension_say_so(tmp_path: Path, command: list[str]) -> None:
    sources = tmp_path / "vtensor"
    shutil.copytree(ROOT / "vtensor", sources, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # -S: no site-packages, and with them no editable install that would be found first.
    result = run_process(sys.executable, "-S", *command, cwd=tmp_path)
    assert result.code == 1
    message = result.err.splitlines()[-1]
    assert message.startswith(f"ImportError: [import vtensor] {sources} is vtensor's source folder")
    assert "Run it elsewhere" in message and "scripts/build.sh" in message


def test_a_torch_is_refused_if_it_is_older(tmp_path: Path) -> None:
    (oldest,) = re.findall('"torch>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    older = ["2.9.1+cu128", "1.13.0a0+git1234"]
    newer = ["2.10.0", "2.11.0a0+git1234", "3.0.0+cpu"]
    assert import_beside("vtensor", "torch", older + newer, tmp_path) == [
        f"[import vtensor] torch {version} is installed, vtensor needs {oldest} or newer: "
        f'pip install "torch>={oldest}"'
        for version in older
    ] + ["imported"] * len(newer)


@pytest.mark.slow
@pytest.mark.seconds(300)
def test_import_is_fast(tmp_path: Path) -> None:
    # Timed inside the process, after `import torch`: the difference between two whole processes would
    # drown in the second or two that torch takes. By the process's clock, which stands while others run.
    code = """
import time
import torch
start = time.process_time()
import vtensor
print((time.process_time() - start) * 1e3)
"""
    command = [sys.executable, "-c", code]
    added = [float(subprocess.check_output(command, cwd=tmp_path, timeout=100)) for _ in range(IMPORT_RUNS)]
    assert min(added) <= IMPORT_LIMIT_MS, f"import vtensor added {[round(ms, 1) for ms in added]} ms"


@pytest.mark.slow
@pytest.mark.seconds(600)
def test_wheel_builds_offline(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    environment = {**os.environ, "HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "ALL_PROXY": nowhere}
    commands = [
        # From the start; what it would compile has been compiled in the folder that the wheel is made in.
        [
            *[Path(sys.executable).with_name("cmake"), f"-DPython_EXECUTABLE={sys.executable}"],
            *["-S", ROOT, "-B", tmp_path / "build"],
        ],
        [
            *[sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"],
            *["-w", tmp_path, ROOT],
        ],
    ]
    for command in commands:
        run_process(*command, cwd=tmp_path, env=environment, timeout=590).check()

    (wheel,) = tmp_path.glob("vtensor-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert sum(re.fullmatch(r"vtensor/_core\..*\.so", name) is not None for name in names) == 1
    assert {name.split("/")[0].split("-")[0] for name in names} == {"vtensor"}
    for file in ("__init__.py", "py.typed", "_core.pyi", "integrations/__init__.py"):
        assert f"vtensor/{file}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_dir_shows_the_public_names_only():
    """No module hides behind a function of its own name, and none that users do not import."""
    code = """
import types
import vtensor
shown = set(dir(vtensor))
assert shown == {*vtensor.__all__, "__version__"}, shown ^ {*vtensor.__all__, "__version__"}
modules = {name for name in shown if isinstance(getattr(vtensor, name), types.ModuleType)}
assert modules == {"errors", "together", "trace"}, modules
assert not hasattr(vtensor, "annotations")
import vtensor.plot, vtensor.testing
assert set(dir(vtensor)) - shown == {"plot", "testing"}
import importlib.util
for name in vtensor.__all__:
    if not isinstance(getattr(vtensor, name), types.ModuleType):
        assert importlib.util.find_spec("vtensor." + name) is None, name
"""
    run_program(code).check()
