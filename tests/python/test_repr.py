"""`repr` of a tensor is one line that costs nothing and works in any state; `str` shows the elements."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import vtensor
from support import filled, quarter


def test_one_line_says_what_it_is(pool):
    t = filled(pool, 10, capacity=6400)  # 2.5 pages
    assert (
        repr(t)
        == f"<VTensor [10, 1024] uint8 on {t.device}, 10 of 6,400 positions along dim 0, 12 KiB mapped>"
    )
    rows = vtensor.empty(2, 3, 0, 8, grow_dim=-2, capacity=16, dtype=torch.bfloat16, pool=pool)
    assert repr(rows).startswith("<VTensor [2, 3, 0, 8] bfloat16 on ")
    assert "0 of 16 positions along dim 2, 0 B mapped" in repr(rows)


def test_it_follows_the_tensor(pool):
    t = filled(pool, 4)
    fork = copy.deepcopy(t)  # on CUDA the tensor's class is another one while pages are shared
    assert "4 of 64" in repr(t) and "4 KiB mapped" in repr(t)
    assert repr(fork) == repr(t)
    t.extend(5)
    assert "[9, 1024]" in repr(t) and "9 of 64" in repr(t) and "12 KiB mapped" in repr(t)
    t.close()
    assert repr(t) == str(t) == f"{t}" == "<VTensor, closed>"
    assert "extend" in dir(t)  # completion in a notebook asks for it


def test_str_shows_the_elements_as_torch_does(pool):
    t = quarter(pool, 3, dtype=torch.float32)
    t.copy_(torch.arange(t.numel()).view(t.shape))
    plain = t.clone()
    assert str(t) == str(plain) == f"{t}" and str(t).startswith("tensor([[")
    assert repr(t[1:]) == repr(plain[1:]) and repr(t.alias()) == repr(plain)  # plain tensors, as ever


@pytest.mark.parametrize("look", [repr, lambda t: repr([t, {"k": t}])], ids=["alone", "in_a_list"])
def test_no_element_is_read_and_no_driver_called(pool, monkeypatch, look):
    t = filled(pool, 9)
    fork = t.fork()
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda self: pytest.fail("elements were read"))
    for operation in ("alias", "pages", "nbytes_mapped"):
        monkeypatch.setattr(vtensor.VTensor, operation, lambda self: pytest.fail("asked the core for more"))
    with vtensor.trace.record() as recording:
        look(t), look(fork)
    assert recording.events() == []
    monkeypatch.undo()


def test_modes_of_torch_do_not_meet_it(pool):
    t = quarter(pool, 3, dtype=torch.float32)
    line = repr(t)
    for mode in (torch.no_grad(), torch.inference_mode(), FakeTensorMode()):
        with mode:
            assert repr(t) == line
    seen = []
    torch.vmap(lambda x: (seen.append(repr(x)), x + 1)[1])(t)
    assert line in seen[0]


def test_a_compiled_region_may_print_it(pool):
    t = quarter(pool, 3, dtype=torch.float32)
    line = repr(t)
    seen = []

    def step(x):
        total = x.sum()
        seen.extend([repr(x), str(x), f"{x}"])
        return total + 1

    torch._dynamo.reset()
    assert torch.compile(step, backend="eager")(t) == t.sum() + 1
    assert seen == [line] * 3
    torch._dynamo.reset()
