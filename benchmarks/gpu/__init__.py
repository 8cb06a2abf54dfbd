"""The questions about a real GPU, answered with figures: ``make gpu``, or ``python -m benchmarks.gpu``.

Each question is a module with ``run(session)``, run in a process of its own with a bound on its time. What it
finds goes to a file line by line, so that a process that dies or hangs loses nothing that it had found
before.

With ``--rehearsal`` all of it runs on a machine without a GPU: the driver is the simulated libcuda of
``tests/simcuda`` (a test double), tensors are CPU tensors, streams are threads. That shows that the code
runs. Its figures are no GPU's, say so, and are never put among the results.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    number: int
    module: str
    seconds: int  # the most it may take; most take less
    text: str
    needs_vtensor: bool = False
    while_building: bool = False  # measures nothing, so that a compiler may run beside it


# In the order in which they are asked: what is known soonest first, what takes longest last.
QUESTIONS = (
    Question(
        0,
        ".recording",
        40,
        "What does the driver answer to the calls that the simulated libcuda models?",
        while_building=True,
    ),
    Question(
        8,
        ".faults",
        45,
        "A write through a read-only alias, a read past the mapped end: what happens?",
        while_building=True,
    ),
    Question(
        11,
        ".pointers",
        25,
        "Which addresses may a Triton kernel be given: those mapped, or reserved too?",
        while_building=True,
    ),
    Question(3, ".waiting", 25, "Do cuMemUnmap or cuMemSetAccess wait for running kernels?"),
    Question(
        1, ".calls", 40, "What does every VMM call cost; what do merged set-access and kept handles save?"
    ),
    Question(10, ".stream_wait", 55, "May the GPU itself wait for a mapping (cuStreamWaitValue32)?"),
    Question(
        2, ".beside_kernels", 35, "Fresh mapping beside running kernels: right results? What does it cost?"
    ),
    Question(12, ".handle_types", 15, "What does cuMemCreate cost with a shareable handle type?"),
    Question(
        7,
        ".graphs",
        25,
        "Does a CUDA graph captured once go on while the tensor grows beneath it?",
        needs_vtensor=True,
    ),
    Question(
        9,
        ".torch_copies",
        35,
        "Deepcopy and save of a plain view whose storage has holes: what happens?",
        needs_vtensor=True,
    ),
    Question(
        4,
        ".attention",
        90,
        "Attention over a VTensor against the same kernel over plain memory?",
        needs_vtensor=True,
    ),
    Question(
        6,
        ".decode",
        180,
        "A decode loop: torch.cat, preallocated, VTensor, VTensor with the mapper?",
        needs_vtensor=True,
    ),
    Question(
        5,
        ".layer_groups",
        30,
        "What does sharing a page between layers cost the kernel?",
        needs_vtensor=True,
    ),
)
