"""A torch tensor that grows in place: reserved addresses, borrowed pages, no copies."""

from importlib.util import find_spec as _find_spec

if _find_spec("vtensor._core") is None:
    raise ImportError(
        f"[import vtensor] {__path__[0]} is vtensor's source folder, without the compiled extension: Python "
        "looks in the folder it is run from before it looks among what is installed. Run it elsewhere, "
        "or build the extension with scripts/build.sh and run .venv/bin/python"
    )

from vtensor import _starting as _starting  # before torch is imported
from vtensor import _torch_version as _torch_version  # before code that an older torch cannot run
from vtensor import _variants as _variants  # registers the classes of tensors with the core
from vtensor import errors, together, trace
from vtensor._faults import explain_faults
from vtensor._lease import lease
from vtensor._memory import adopt, memory
from vtensor._notebook import draw_with as _draw_with
from vtensor.arena import Arena, ArenaStats
from vtensor.blocks import Blocks
from vtensor.errors import (
    Asleep,
    CapacityExceeded,
    Closed,
    DriverError,
    InvalidArgument,
    NoFreeSlot,
    OutOfPages,
    TimedOut,
    VTensorError,
)
from vtensor.kv import KVCache, KVCacheStats
from vtensor.pool import Pool, PoolStats, default_pool
from vtensor.tensor import PageRecord, VTensor, empty, empty_like, from_tensor, zeros

__version__ = "0.2.0"


def _draw(shown: object) -> dict[str, str]:
    from vtensor._html import bundle  # only notebooks need it

    return bundle(shown)


_draw_with(_draw)

# Public modules that are imported by name.
_BY_NAME = {"attention", "integrations", "plot", "serving", "testing"}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", *(_BY_NAME & globals().keys())])


__all__ = [
    "Arena",
    "ArenaStats",
    "Asleep",
    "Blocks",
    "CapacityExceeded",
    "Closed",
    "DriverError",
    "InvalidArgument",
    "KVCache",
    "KVCacheStats",
    "NoFreeSlot",
    "OutOfPages",
    "PageRecord",
    "Pool",
    "PoolStats",
    "TimedOut",
    "VTensor",
    "VTensorError",
    "adopt",
    "default_pool",
    "empty",
    "empty_like",
    "errors",
    "explain_faults",
    "from_tensor",
    "lease",
    "memory",
    "together",
    "trace",
    "zeros",
]
