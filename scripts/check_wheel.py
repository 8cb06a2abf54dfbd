#!/usr/bin/env python3
"""check_wheel.py FILE...: what vtensor's extension takes from the system and lets out; wheels or extensions.

auditwheel compares the versions of symbols. A symbol without a version is one that the C library of the
link did not have: auditwheel does not see it, and the import fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

EXPORTS = {"PyInit__core", "vtensor_allocate", "vtensor_free"}
LIBRARIES = r"libstdc\+\+|libm|libgcc_s|libc|libpthread|libdl|librt|ld-linux-\w+(-\w+)*"
LARGEST = 3 << 20
NEWEST_GLIBC = 28  # of 2.x


def problems(extension: Path) -> Iterator[str]:
    """What is wrong with an extension, a sentence each."""
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\.so", output("readelf", "-dW", extension))
    if wrong := {library for library in needed if not re.fullmatch(LIBRARIES, library)}:
        yield f"it links {some(wrong)}: one build serves every PyTorch, with CUDA or without"
    exported = {line.split()[-1].split("@")[0] for line in symbols(extension, "--defined-only")}
    if exported - EXPORTS:
        yield f"it lets out {some(exported - EXPORTS)}: csrc/bind/exports.map has what may leave"
    if EXPORTS - exported:
        yield f"it does not let out {some(EXPORTS - exported)}"
    undefined = (line.split()[-2:] for line in symbols(extension, "--undefined-only"))
    if missing := {
        name for kind, name in undefined if kind == "U" and "@" not in name and not re.match("_?Py", name)
    }:
        yield f"no library that it was linked with has {some(missing)}"


def some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def symbols(extension: Path, which: str) -> list[str]:
    return output("nm", "-D", which, extension).splitlines()


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(files: list[Path]) -> int:
    found = []
    for file in files:
        with tempfile.TemporaryDirectory() as folder:
            extensions = [file]
            if file.suffix == ".whl":
                if file.stat().st_size > LARGEST:
                    found.append(f"{file.name}: {file.stat().st_size} bytes, at most {LARGEST} are allowed")
                glibc = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", file.name)]
                if not glibc or min(glibc) > NEWEST_GLIBC:
                    found.append(f"{file.name}: not for glibc 2.{NEWEST_GLIBC}")
                zipfile.ZipFile(file).extractall(folder)
                extensions = list(Path(folder).rglob("*.so"))
                if [extension.name.split(".")[0] for extension in extensions] != ["_core"]:
                    found.append(f"{file.name}: {len(extensions)} shared libraries, _core alone is expected")
            found += [
                f"{file.name}: {problem}" for extension in extensions for problem in problems(extension)
            ]
    print("\n".join(found) if found else f"{len(files)} checked: nothing is wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
