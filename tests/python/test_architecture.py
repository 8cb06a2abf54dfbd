"""Which files may include or import which (DESIGN section 3)."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from support import ROOT

CPP = sorted(ROOT.glob("csrc/*/*.h")) + sorted(ROOT.glob("csrc/*/*.cpp"))
CORE_PYTHON = sorted(ROOT.glob("vtensor/**/*.py"))
INTEGRATIONS = sorted(ROOT.glob("integrations/**/*.py"))

# bind -> kv -> tensor -> policy -> vmm -> driver.h -> base, and never back.
ROOMS = ("vmm", "policy", "tensor", "arena", "heap", "kv", "bind")
# A pattern names the headers of ours that a room may include.
MAY_INCLUDE = {
    "base": r"base/.*",
    "driver": r"(base|driver)/.*",
    **{room: rf"(base|{'|'.join(ROOMS[: i + 1])})/.*|driver/driver\.h" for i, room in enumerate(ROOMS)},
}
# Parts of vtensor.testing, which nothing else imports.
MAY_NEED = {
    "vtensor/testing/cache_machine.py": {"hypothesis"},
    "vtensor/testing/machine.py": {"hypothesis"},
    "vtensor/testing/strategies.py": {"hypothesis"},
    "vtensor/testing/plugin.py": {"pytest"},
}

FOREIGN = re.compile(r"Python\.h|nanobind/|pybind11/|.*dlpack", re.IGNORECASE)
TORCH = re.compile(r"torch/|ATen/|c10/")

# Comments and literals of C++, from one end to the other.
CPP_TEXT = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'""", re.DOTALL)


def includes(path: Path) -> Iterator[tuple[str, str]]:
    """("<" or '"', header) of each include of a C++ file."""
    for line in path.read_text().splitlines():
        if match := re.match(r'\s*#\s*include\s*([<"])([^>"]+)', line):
            yield match.group(1), match.group(2)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_cpp_layers() -> None:
    wrong = []
    for path in CPP:
        layer = path.parent.name
        for kind, header in includes(path):
            if kind == '"' and not re.fullmatch(MAY_INCLUDE[layer], header):
                wrong.append(f"{name(path)}: {layer} may not include {header}")
            if kind == '"' and not (ROOT / "csrc" / header).exists():
                wrong.append(f"{name(path)}: {header} is not relative to csrc/")
            driver = re.match(r"driver/(host|cuda)_", header)
            if layer == "driver" and driver and not path.name.startswith(f"{driver[1]}_"):
                wrong.append(f"{name(path)} includes {header}, which is one driver's")
            if layer != "bind" and FOREIGN.match(header):
                wrong.append(f"{name(path)}: {layer} knows nothing of {header}")
            if TORCH.match(header):
                wrong.append(f"{name(path)}: {header}, but one build serves every PyTorch")
            if header == "cuda.h":
                wrong.append(f"{name(path)}: cuda.h, but the build needs nothing of CUDA")
    assert not wrong


def test_no_friends_across_rooms() -> None:
    """A class opens its data to the classes of its own room alone."""
    home = {
        found.group(1): path.parent.name
        for path in CPP
        for found in re.finditer(
            r"^(?:class|struct) (?:VT_\w+\(.*?\) )?(\w+)[^;]*\{", path.read_text(), re.MULTILINE
        )
    }
    friends = [
        (path, found.group(1))
        for path in CPP
        for found in re.finditer(r"friend (?:class|struct) (?:\w+::)*(\w+);", path.read_text())
    ]
    assert friends
    wrong = [f"{name(path)}: friend {friend}" for path, friend in friends if home[friend] != path.parent.name]
    assert not wrong


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_level(tree: ast.Module) -> ast.Module:
    """The statements that run at import: not the bodies of functions, nor `if TYPE_CHECKING`."""
    kept = [
        node
        for node in tree.body
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    return ast.Module(body=kept, type_ignores=[])


def test_import_of_vtensor_needs_torch_only() -> None:
    wrong = []
    for path in CORE_PYTHON:
        needed = {m.split(".")[0] for m in imported_modules(module_level(ast.parse(path.read_text())))}
        foreign = (
            needed - set(sys.stdlib_module_names) - {"torch", "vtensor"} - MAY_NEED.get(name(path), set())
        )
        wrong += [f"{name(path)} imports {module} at module level" for module in sorted(foreign)]
    assert not wrong


def is_private(module: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in module.split("."))


def test_integrations_use_public_modules_only() -> None:
    wrong = [
        f"{name(path)} imports {module}"
        for path in INTEGRATIONS
        for module in imported_modules(ast.parse(path.read_text()))
        if module.startswith("vtensor.") and is_private(module)
    ]
    assert not wrong


def cpp_identifiers(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", CPP_TEXT.sub(" ", text)))


def test_what_is_declared_of_libcuda_is_held_equal_to_cuda_h() -> None:
    declared, checked = (
        cpp_identifiers((ROOT / file).read_text())
        for file in ("csrc/driver/cuda_abi.h", "tests/cuda_abi/equal.cpp")
    )
    declared = {identifier for identifier in declared if identifier.lower().startswith("cu")}
    if "VTENSOR_CUDA_CALLS" in checked:
        calls = (ROOT / "csrc/base/calls.h").read_text()
        checked |= set(re.findall(r"X\(\w+, (\w+)\)", calls))
    assert declared and not declared - checked, "tests/cuda_abi/equal.cpp compares each of them"
