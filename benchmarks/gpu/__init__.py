"""The questions about a real GPU, answered with figures: ``make gpu``, or ``python -m benchmarks.gpu``.

Each question is a function of a session, run in a process of its own with a bound on its time. What it finds
is printed and added to one file of JSON lines at once, so that a process that dies or hangs loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    function: str  # "module.function" of this package: what needs vtensor is imported only where it is asked
    seconds: int  # the most it may take; most take less
    text: str
    while_building: bool = False  # needs no vtensor and measures nothing, so a compiler may run beside it


# In the order in which they are asked: what is known soonest first, what takes longest last.
QUESTIONS = {
    0: Question("recording.record", 40, "What does the driver answer to VMM calls, wrong ones too?", True),
    8: Question("mapping.faults", 45, "A write through a read-only alias, a read past the end?", True),
    11: Question("mapping.pointers", 25, "Which addresses may a Triton kernel be given?", True),
    3: Question("mapping.waiting", 25, "Which driver calls wait for running kernels?"),
    1: Question("mapping.calls", 40, "What does every VMM call cost; what do merging and kept handles save?"),
    10: Question("mapping.stream_wait", 55, "May the GPU itself wait for a mapping (cuStreamWaitValue32)?"),
    2: Question(
        "mapping.beside_kernels", 35, "Fresh mapping beside kernels: is it right, what does it cost?"
    ),
    12: Question("mapping.handle_types", 15, "What does cuMemCreate cost with a shareable handle type?"),
    7: Question("tensors.graphs", 25, "Does a captured CUDA graph go on while the tensor grows beneath it?"),
    9: Question("tensors.torch_copies", 35, "Deepcopy and save of a view whose storage has holes?"),
    4: Question("tensors.attention", 90, "Attention over a VTensor against the same over plain memory?"),
    6: Question(
        "tensors.decode", 180, "Decoding: torch.cat, preallocated, VTensor, VTensor with the worker?"
    ),
    5: Question("tensors.layer_groups", 30, "What does sharing a page between layers cost the kernel?"),
}
