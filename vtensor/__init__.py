"""A torch tensor that grows in place: reserved addresses, borrowed pages, no copies."""

from importlib.util import find_spec as _find_spec

if _find_spec("vtensor._core") is None:
    raise ImportError(
        f"[import vtensor] {__path__[0]} is vtensor's source folder, without the compiled extension: Python "
        "looks in the folder it is run from before it looks among what is installed. Run it elsewhere, "
        "or build the extension with scripts/build.sh and run .venv/bin/python"
    )

from vtensor._base import starting as _starting  # noqa: F401 - before torch is imported

# isort: split
from vtensor import errors, together, trace
from vtensor._base.faults import explain_faults
from vtensor._torch import variants as _variants  # noqa: F401 - registers the tensors' classes
from vtensor._torch.memory import adopt, memory
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
from vtensor.sharing import ArenaReader, CacheReader, ModuleReader, Reader, share
from vtensor.tensor import PageRecord, VTensor, empty, empty_like, from_tensor, lease, zeros

__version__ = "0.2.0"


# Public modules that are imported by name.
_BY_NAME = {"attention", "integrations", "plot", "serving", "testing"}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", *(_BY_NAME & globals().keys())])


__all__ = [
    "Arena",
    "ArenaReader",
    "ArenaStats",
    "Asleep",
    "Blocks",
    "CacheReader",
    "CapacityExceeded",
    "Closed",
    "DriverError",
    "InvalidArgument",
    "KVCache",
    "KVCacheStats",
    "ModuleReader",
    "NoFreeSlot",
    "OutOfPages",
    "PageRecord",
    "Pool",
    "PoolStats",
    "Reader",
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
    "share",
    "together",
    "trace",
    "zeros",
]
