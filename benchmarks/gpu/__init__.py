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


# The first eight leave three minutes of eight to the build and the tests. The others take longest and get
# what is left; where that is not enough, they fit a call of their own.
QUESTIONS = (
    Question(
        0, ".recording", 40, "What does the driver answer to the calls that the simulated libcuda models?"
    ),
    Question(
        1, ".calls", 40, "What does every VMM call cost; what do merged set-access and kept handles save?"
    ),
    Question(
        2, ".beside_kernels", 35, "Fresh mapping beside running kernels: right results? What does it cost?"
    ),
    Question(3, ".waiting", 25, "Do cuMemUnmap or cuMemSetAccess wait for running kernels?"),
    Question(
        8, ".faults", 45, "A write through a read-only alias, a read past the mapped end: what happens?"
    ),
    Question(
        9, ".torch_copies", 35, "Deepcopy and save of a plain view whose storage has holes: what happens?"
    ),
    Question(7, ".graphs", 25, "Does a CUDA graph captured once go on while the tensor grows beneath it?"),
    Question(10, ".stream_wait", 55, "May the GPU itself wait for a mapping (cuStreamWaitValue32)?"),
    Question(4, ".attention", 90, "Attention over a VTensor against the same kernel over plain memory?"),
    Question(6, ".decode", 180, "A decode loop: torch.cat, preallocated, VTensor, VTensor with the mapper?"),
    Question(5, ".layer_groups", 30, "What does sharing a page between layers cost the kernel?"),
)
