"""Operations by their code: each of ours, and torch's on a VTensor, for tests of what refuses them all."""

from __future__ import annotations

import copy
import io
import pickle

import numpy
import torch

import vtensor
from support import quarter

__all__ = ["NAMES", "OPERATIONS", "TORCH_OPERATIONS"]

# What they name besides what they are done to.
NAMES = {
    "copy": copy,
    "io": io,
    "numpy": numpy,
    "pickle": pickle,
    "quarter": quarter,
    "torch": torch,
    "vtensor": vtensor,
}


def _codes(text: str) -> list[str]:
    return [code for line in text.strip().splitlines() for code in line.split("; ")]


# One call of everything that does something.
OPERATIONS = _codes("""
t.extend(1); t.append(x); t.shrink(1); t.shrink(1, front=True); t.truncate(1); t.prepare(1); t.fork()
t.reallocate(100); t.unshare(0, 1); t.reindex([1, 0]); t.alias(); t.pages(); t.nbytes_mapped; t.close()
t.record_stream(0); vtensor.lease(t).__enter__(); vtensor.together.reindex([t], [[1, 0]]); shared.extend(1)
quarter(pool, 1); vtensor.empty_like(t, dtype=torch.uint8); vtensor.zeros(2, 3, grow_dim=0, capacity=9)
vtensor.from_tensor(x, 1, 9, pool=pool); vtensor.default_pool(); vtensor.Pool("cpu", budget=1 << 20)
pool.stats(); pool.trim(); setattr(pool, "budget", 2**20); pool.wait_idle(timeout=1); pool.close()
pool.sleep(contents="host"); pool.wake(); vtensor.adopt(torch.nn.Linear(2, 2), pool)
vtensor.KVCache(pool=pool, **shape); vtensor.Arena(4096, pool=pool)
cache.alloc(); cache.step([21, 0]); cache.prepare([21, 0]); cache.fits([21, 0]); cache.free(slot)
cache.wait(slot); cache.truncate(slot, 1); cache.fork(slot); cache.reorder([slot], [slot])
cache.publish(slot, [1] * 20); cache.swap_out(slot); cache.swap_in(slot); cache.write(0, slot, 0, *kv)
cache.lengths; cache.length(slot); cache[0]; cache.pages(slot); cache.stats(); cache.close()
arena.tensor; arena.map([(0, 1)]); arena.unmap([(0, 1)]); arena.holds([(0, 1)]); arena.prepare([(0, 1)])
arena.trim(); arena.stats(); arena.pages(); arena.close(); blocks.hold([0]); blocks.prepare([0])
blocks.release([0]); blocks.begin_step(); blocks.whole([0]); blocks.trim([0]); blocks.mapped
""")
# Torch's on a VTensor `t`, and what others do with one.
TORCH_OPERATIONS = _codes("""
t + 1; 1 + t; torch.add(torch.ones(1), t); torch.cat([t, t]); t[0]; t.__setitem__(0, 1); t.fill_(1); t.shape
torch.zeros(0, out=t); t.data_ptr(); len(t); list(t); bool(t == t); t.clone(); t.detach(); t.cpu(); t.numpy()
t.to(torch.int); t.tolist(); numpy.asarray(t); t.__dlpack__(); t.data; str(t); t.untyped_storage()
pickle.dumps(t); torch.save(t, io.BytesIO()); copy.copy(t); copy.deepcopy(t); torch.nn.functional.linear(t, t)
""")
