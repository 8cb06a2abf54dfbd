#!/usr/bin/env python3
"""sbom.py VERSION FILE...: prints a CycloneDX bill of materials of what the wheels contain and need.

Run it where the release was built: the versions of nanobind and GCC are those of this machine's build.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).parents[1]


def bill(version: str, files: list[Path]) -> dict[str, Any]:
    """The bill of materials. ``vtensor`` contains nanobind and GCC's C++ runtime, and depends on torch."""
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("nanobind==")
    )
    gcc = subprocess.run(
        ["g++", "-dumpfullversion"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (torch,) = re.findall(
        r'^dependencies = \["torch(>=[0-9.]+)"\]', (ROOT / "pyproject.toml").read_text(), re.M
    )
    contained = [
        component("library", "nanobind", pinned["nanobind"], "BSD-3-Clause"),
        component("library", "libstdc++", gcc, "GPL-3.0-or-later WITH GCC-exception-3.1"),
    ]
    needed = [
        {
            "type": "library",
            "name": "torch",
            "bom-ref": "torch",
            "description": f"torch{torch}, not contained",
        }
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component("library", "vtensor", version, "Apache-2.0")},
        "components": [*contained, *needed, *(file(path) for path in files)],
        "dependencies": [
            {"ref": "vtensor", "dependsOn": [part["bom-ref"] for part in [*contained, *needed]]},
        ],
    }


def component(kind: str, name: str, version: str, licence: str) -> dict[str, Any]:
    return {
        "type": kind,
        "name": name,
        "version": version,
        "bom-ref": name,
        "licenses": [{"expression": licence}],
    }


def file(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "type": "file",
        "name": path.name,
        "bom-ref": path.name,
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }


def main(version: str, files: list[Path]) -> None:
    text = json.dumps(bill(version, files), indent=1)
    if wrong := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"error: not CycloneDX: {wrong}")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1], [Path(argument) for argument in sys.argv[2:]])
