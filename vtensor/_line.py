"""A tensor in one line, for ``repr``. Debuggers, logs and failed assertions call it often."""

from __future__ import annotations

import torch

from vtensor import _core
from vtensor._units import byte_text


def tensor_line(tensor: torch.Tensor, core: _core.TensorCore) -> str:
    """A VTensor's shape, dtype, device, length, capacity, and bytes mapped or that it sleeps.

    Reads no element, waits for no device and no lock, makes no driver call. The bytes may be a moment old.
    """
    # Closed and copy-on-write tensors answer torch's attributes in Python, or refuse to.
    with torch._C.DisableTorchFunctionSubclass():
        if core.closed:
            return "<VTensor, closed>"
        dtype = str(tensor.dtype).removeprefix("torch.")
        # grad_fn, unlike requires_grad, is set after a write of a tensor that requires grad.
        graph = f", grad_fn=<{type(tensor.grad_fn).__name__}>" if tensor.grad_fn is not None else ""
        memory = "asleep" if core.asleep else f"{byte_text(core.mapped_bytes_seen)} mapped"
        return (
            f"<VTensor {list(tensor.shape)} {dtype} on {tensor.device}, "
            f"{core.length:,} of {core.capacity:,} positions along dim {core.grow_dim}, "
            f"{memory}{graph}>"
        )
