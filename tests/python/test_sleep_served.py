"""A served model that sleeps and wakes in the middle of a run: the same tokens (I8)."""

from __future__ import annotations

import pytest

import vtensor
from test_serving_engine import alone, engine_for, mixed_requests
from tiny_models import make_llama, one_thread  # noqa: F401
from vtensor import testing

CYCLES = 10


@pytest.mark.parametrize("contents", ["host", "folder"])
@pytest.mark.parametrize("shared", [False, True], ids=["weights in a pool of their own", "one budget"])
def test_cycles_in_the_middle_of_a_run(tmp_path, contents, shared):
    """Weights and K and V go together and apart; requests are preempted in between."""
    model = make_llama("sdpa")
    requests = mixed_requests()
    expected = {request.id: alone(model, request) for request in requests}
    with engine_for(model, pages=200 if shared else 24) as engine:
        pool = engine.scheduler.cache.pool
        weights = pool if shared else vtensor.Pool("cpu", budget="64MiB", prefetch=0)
        vtensor.adopt(model, weights)
        addresses = [p.data_ptr() for p in model.parameters()]
        for request in requests:
            engine.submit(request)
        cycles = steps = 0
        done = {}
        while engine.unfinished:
            for completion in engine.step():
                done[completion.id] = completion.tokens
            steps += 1
            if steps % 4 == 0 and cycles < CYCLES:
                cycles += 1
                kept = "host" if contents == "host" else tmp_path
                if cycles % 2:
                    pool.sleep(tag="kv", contents=kept)
                    with pytest.raises(vtensor.Asleep):
                        engine.step()
                else:
                    pool.sleep(contents=kept)
                    assert pool.stats().pages_used == 0
                if not shared:
                    weights.sleep(contents="host")
                    assert weights.stats().pages_used == 0
                    weights.wake()
                pool.wake()
                testing.check_invariants(pool)
                assert [p.data_ptr() for p in model.parameters()] == addresses
        assert cycles == CYCLES
        assert done == expected
        if not shared:
            weights.close()
