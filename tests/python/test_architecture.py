"""Which files may include or import which, the words of the code, and file sizes (DESIGN section 3)."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ONE_SCREEN = 40  # lines

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
DRIVERS = ("host", "cuda")

# Comments and literals of C++, from one end to the other.
CPP_TEXT = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'""", re.DOTALL)

# Threads, pages and callers are things, and a sentence says which of them does what.
PERSONS = re.compile(r"\b(who|whoever|whom|somebody|nobody|anybody|told)\b", re.IGNORECASE)
IN_PLAIN_WORDS = (
    "csrc/*/*",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "README.md",
    "csrc/DESIGN.md",
    "docs/**/*.md",
    "vtensor/**/*.py",
    "integrations/**/*.md",
    "integrations/**/*.py",
    "examples/*.py",
)

# Words that mean something else to an engine or an allocator.
BANNED_WORDS = {"block", "blocks", "chunk", "chunks", "segment", "segments"}
# Where an engine's blocks are meant.
OF_ENGINES = {
    "csrc/arena/blocks.h",
    "csrc/arena/blocks.cpp",
    "csrc/bind/arena.cpp",
    "vtensor/blocks.py",
    "vtensor/__init__.py",
}


def includes(path: Path) -> Iterator[tuple[str, str]]:
    """("<" or '"', header) of each include of a C++ file."""
    for line in path.read_text().splitlines():
        if match := re.match(r'\s*#\s*include\s*([<"])([^>"]+)', line):
            yield match.group(1), match.group(2)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def cpp_texts(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment and literal of a C++ file."""
    for found in CPP_TEXT.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, found[0]


def python_texts(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment and string of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
            yield token.start[0], token.string


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each line of a Markdown file that is outside code fences."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        if not fenced and not fence:
            yield number, line


TEXTS = {".h": cpp_texts, ".cpp": cpp_texts, ".py": python_texts, ".md": prose}


def test_there_is_something_to_check() -> None:
    assert {path.parent.name for path in CPP} == set(MAY_INCLUDE)
    assert CORE_PYTHON and INTEGRATIONS


def test_cpp_layers() -> None:
    wrong = []
    for path in CPP:
        layer = path.parent.name
        for kind, header in includes(path):
            if kind == '"' and not re.fullmatch(MAY_INCLUDE[layer], header):
                wrong.append(f"{name(path)}: {layer} may not include {header}")
            if kind == '"' and not (ROOT / "csrc" / header).exists():
                wrong.append(f"{name(path)}: {header} is not relative to csrc/")
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


def test_the_core_names_no_option() -> None:
    """Options are spelled where they are taken: in the bindings and in Python."""
    wrong = [
        f"{name(path)}: {text}"
        for path in CPP
        if path.parent.name != "bind"
        for _, text in cpp_texts(path.read_text())
        if text.startswith('"') and re.search(r"\b[a-z_]+=", text)
    ]
    assert not wrong


def driver_of(file: str) -> str | None:
    """Which of DRIVERS a file of csrc/driver belongs to; None for what they share."""
    return next((driver for driver in DRIVERS if file.startswith(f"{driver}_")), None)


def test_drivers_know_nothing_of_each_other() -> None:
    wrong = []
    for path in CPP:
        if path.parent.name != "driver":
            continue
        for _, header in includes(path):
            theirs = driver_of(header.removeprefix("driver/"))
            if theirs and theirs != driver_of(path.name):
                wrong.append(f"{name(path)} includes {header}")
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


def test_the_data_of_a_class_stands_on_one_screen() -> None:
    """All data members of a class of the core stand together, so that its state can be seen whole."""
    member = re.compile(r"  (?!return|using|friend)[\w:<>,*&(][\w:<>,*&() ]* \*?\w+_(;| =|\{|,)")
    spans = {}
    for path in CPP:
        lines = path.read_text().splitlines()
        for i, line in enumerate(lines):
            if found := re.match(r"(?:class|struct) (\w+)[^;]*\{$", line):
                members = [k for k in range(i, lines.index("};", i)) if member.match(lines[k])]
                if path.suffix == ".h" and members:
                    spans[f"{name(path)}: {found[1]}"] = members[-1] - members[0] + 1
    assert len(spans) > 20
    wrong = {where: lines for where, lines in spans.items() if lines > ONE_SCREEN}
    assert not wrong, f"data members stand together, in at most {ONE_SCREEN} lines"


def test_a_class_stands_in_one_source_file() -> None:
    """A class is read as a whole. A nested class belongs to the class around it."""
    function = re.compile(r"^(?:\w[^\n(]*[ *&])?([A-Z]\w*)(?:<[^>\n]*>)?::[\w:]*~?\w+\(", re.MULTILINE)
    homes: dict[str, set[str]] = {}
    for path in CPP:
        if path.suffix == ".cpp":
            for found in function.finditer(path.read_text()):
                homes.setdefault(found[1], set()).add(name(path))
    assert len(homes) > 40
    several = {which: sorted(files) for which, files in homes.items() if len(files) > 1}
    assert not several, (
        "the functions of a class stand in one source file: move them there, or divide the class by subject "
        "into classes that own their data"
    )


def cpp_identifiers(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", CPP_TEXT.sub(" ", text)))


def test_what_is_declared_of_libcuda_is_held_equal_to_cuda_h() -> None:
    declared, checked = (
        cpp_identifiers((ROOT / file).read_text())
        for file in ("csrc/driver/cuda_abi.h", "tests/cuda_abi/equal.cpp")
    )
    declared = {identifier for identifier in declared if identifier.lower().startswith("cu")}
    assert declared and not declared - checked, "tests/cuda_abi/equal.cpp compares each of them"


def python_identifiers(text: str) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def words_of(identifier: str) -> set[str]:
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier)
    return {word.lower() for word in parted.split("_")}


def test_words() -> None:
    wrong = []
    for path in [*CPP, *CORE_PYTHON]:
        text = path.read_text()
        identifiers = python_identifiers(text) if path.suffix == ".py" else cpp_identifiers(text)
        for identifier in identifiers:
            allowed = {"block", "blocks"} if name(path) in OF_ENGINES else set()
            if words_of(identifier) & BANNED_WORDS - allowed:
                wrong.append(f"{name(path)}: {identifier}")
    assert not wrong, "the words for memory are page, page handle, row, slot, address range"


def test_plain_words() -> None:
    """Comments, docstrings, messages and pages speak of things, not of persons."""
    files = [path for glob in IN_PLAIN_WORDS for path in sorted(ROOT.glob(glob)) if path.suffix in TEXTS]
    wrong = [
        f"{name(path)}:{line}: {found[0]}"
        for path in files
        for line, text in TEXTS[path.suffix](path.read_text())
        for found in PERSONS.finditer(text)
    ]
    assert all(any(ROOT.glob(glob)) for glob in IN_PLAIN_WORDS)
    assert not wrong, "say which thread, page or caller it is"
