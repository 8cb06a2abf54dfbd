"""What differs between releases of transformers. docs/versions.md lists the tested ones."""

from __future__ import annotations

import transformers
from packaging.version import Version

OLDEST = "5.17"

CACHE = "cache" if Version(transformers.__version__).release >= (5, 24) else "past_key_values"
"""The name of a model's argument for its cache. Since 5.24 the other one works too, with a warning."""

if Version(transformers.__version__) < Version(OLDEST):
    raise ImportError(
        f"[vtensor.integrations.transformers] transformers {transformers.__version__} is installed, and "
        f"{OLDEST} is the oldest that works: pip install 'transformers>={OLDEST}'"
    )
