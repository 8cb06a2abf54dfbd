"""Refuses a transformers that is too old for the cache. docs/versions.md lists the tested releases."""

from __future__ import annotations

import transformers
from packaging.version import Version

OLDEST = "5.17"

if Version(transformers.__version__) < Version(OLDEST):
    raise ImportError(
        f"[vtensor.integrations.transformers] transformers {transformers.__version__} is installed, and "
        f"{OLDEST} is the oldest that works: pip install 'transformers>={OLDEST}'"
    )
