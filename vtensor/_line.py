"""A tensor in one line, for ``repr``: what debuggers, logs and failed assertions show, however often."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vtensor._pages import byte_text

if TYPE_CHECKING:
    from vtensor.tensor import VTensor


def tensor_line(tensor: VTensor) -> str:
    """Shape, dtype, device, length of capacity and bytes mapped: no element is read, no device or lock waited
    for, no driver called. The bytes may be a moment old."""
    # Closed tensors and guarded ones answer torch's attributes in Python, or refuse to.
    with torch._C.DisableTorchFunctionSubclass():
        core = tensor._core
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
