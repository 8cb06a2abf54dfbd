"""What an attention kernel requires of query, key and value, and how it is given them.

For what launches kernels over VTensors and layers of a KVCache. One call of an :class:`AttentionSpec` before
each launch decides all of it, in C++: in Python that takes 20 to 35 microseconds, and twice as long behind a
kernel that has left the interpreter's memory cold.
"""

from __future__ import annotations

from vtensor._core import AttentionSpec

__all__ = ["AttentionSpec"]
