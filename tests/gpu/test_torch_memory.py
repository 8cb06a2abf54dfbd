"""torch's own allocations in a pool: a training step on a real GPU, against torch's own allocator."""

from __future__ import annotations

import gc

import pytest
import torch

import vtensor
from devices import PAGE

pytestmark = pytest.mark.parametrize("device", ["gpu"], indirect=True)


@pytest.fixture
def pool(device):
    """256 pages of 2 MiB; in the end nothing is left of them (I14)."""
    pool = device.pool(page_size=PAGE, budget=256 * PAGE)
    yield pool
    gc.collect()
    pool.close()
    torch.cuda.empty_cache()
    pool.close()  # gives back what torch had kept
    assert pool.stats().pages_used == 0


def losses(steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.LayerNorm(512), torch.nn.Linear(512, 8)]
    model = torch.nn.Sequential(*layers).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for step in range(steps):
        x = torch.randn(64 + 32 * step, 512, device="cuda")
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("threads", [True, False], ids=["backward elsewhere", "backward here"])
def test_a_training_step_in_a_pool(pool, threads):
    expected = losses()
    with vtensor.memory(pool), torch.autograd.set_multithreading_enabled(threads):
        found = losses()
        used = pool.stats().nbytes_by_tag["memory"]
    assert found == expected
    assert used >= PAGE


def test_tensors_outlive_the_pool_and_its_refusal_is_told(pool):
    with pytest.raises(torch.OutOfMemoryError) as refused, vtensor.memory(pool):
        kept = torch.full((1 << 20,), 7.0, device="cuda")
        torch.empty(512 * PAGE, dtype=torch.uint8, device="cuda")
    assert "[memory]" in refused.value.__notes__[0]
    pool.close()
    assert kept.eq(7).all()


def test_a_module_is_adopted_from_the_host(pool):
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512)
    x = torch.randn(4, 512)
    model(x).sum().backward()
    expected = model.to(torch.float32)(x).detach()
    weight = model.weight
    vtensor.adopt(model, pool)
    assert model.weight is weight and weight.is_cuda and weight.grad.is_cuda
    torch.testing.assert_close(model(x.cuda()).cpu().detach(), expected, rtol=1e-4, atol=1e-4)


def test_a_module_of_the_device_stays_there_without_a_pool(device):
    model = torch.nn.Linear(512, 512, device="cuda")
    expected = model.weight.detach().clone()
    assert vtensor.adopt(model) > 0
    assert model.weight.is_cuda and torch.equal(model.weight, expected)
