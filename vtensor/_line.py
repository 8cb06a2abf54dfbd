"""A tensor in one line, for ``repr``: what debuggers, logs and failed assertions show, however often."""

from __future__ import annotations

import torch

from vtensor import _core
from vtensor._units import byte_text


def tensor_line(tensor: torch.Tensor, core: _core.TensorCore) -> str:
    """A VTensor's shape, dtype, device, length of capacity and bytes mapped: no element is read, no device or
    lock waited for, no driver called. The bytes may be a moment old."""
    # Closed tensors and copy-on-write ones answer torch's attributes in Python, or refuse to.
    with torch._C.DisableTorchFunctionSubclass():
        if core.closed:
            return "<VTensor, closed>"
        dtype = str(tensor.dtype).removeprefix("torch.")
        # Unlike requires_grad, it is set where somebody wrote a tensor that requires grad into this one.
        graph = f", grad_fn=<{type(tensor.grad_fn).__name__}>" if tensor.grad_fn is not None else ""
        return (
            f"<VTensor {list(tensor.shape)} {dtype} on {tensor.device}, "
            f"{core.length:,} of {core.capacity:,} positions along dim {core.grow_dim}, "
            f"{byte_text(core.mapped_bytes_seen)} mapped{graph}>"
        )
