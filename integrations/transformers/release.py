"""What differs between releases of transformers. docs/versions.md lists the tested ones."""

from __future__ import annotations

import inspect

import transformers
from packaging.version import Version

OLDEST = "5.17"

if Version(transformers.__version__) < Version(OLDEST):
    raise ImportError(
        f"[vtensor.integrations.transformers] transformers {transformers.__version__} is installed, and "
        f"{OLDEST} is the oldest that works: pip install 'transformers>={OLDEST}'"
    )

# Renamed in 5.24. The old name still works there, with a warning.
_NAMES = ("cache", "past_key_values")
_taken = inspect.signature(transformers.GenerationMixin.prepare_inputs_for_generation).parameters
if _taken.keys().isdisjoint(_NAMES):
    raise ImportError(
        f"[vtensor.integrations.transformers] transformers {transformers.__version__} is installed, whose "
        f"models take no argument {' or '.join(_NAMES)}: docs/versions.md names releases that work"
    )

CACHE = next(name for name in _NAMES if name in _taken)
"""The name of a model's argument for its cache."""
