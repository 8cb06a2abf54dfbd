"""What an attention kernel requires of query, key and value.

An :class:`AttentionSpec` checks and converts the arguments of a launch over VTensors or layers of a KVCache
in one call of C++. The same checks in Python take 20 to 35 microseconds, and twice as long after a kernel
that has left the interpreter's memory cold.
"""

from __future__ import annotations

from vtensor._core import AttentionSpec

__all__ = ["AttentionSpec"]
