"""Requests that are cancelled, an engine's progress, and prefixes that a refused admission leaves alone."""

from __future__ import annotations

import sys

import pytest

from serving_support import FakeModel, Store, alone, choose, engine_over, opened
from vtensor import InvalidArgument
from vtensor.serving import Engine, Request, Scheduler

LONG = Request("long", [1] * 8, 40)
SHORT = Request("short", [2] * 6, 3)
MANY = Request("many", [3] * 6, 30, samples=2)
NEVER = Request("never", [4] * 60, 4)  # in 28 pages


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_in_any_state(steps):
    """Waiting, computing its prompt, running; through the scheduler as well."""
    for cancel in ("engine", "scheduler"):
        with opened("host", 60) as cache:
            engine = engine_over(cache, token_budget=4)
            engine.submit(LONG)
            for _ in range(steps):
                engine.step()
            (engine if cancel == "engine" else engine.scheduler).cancel("long")
            assert engine.unfinished == 1
            (completion,) = engine.step() if cancel == "engine" else engine.run().values()
            assert (completion.id, completion.error) == ("long", "cancelled")
            (tokens,) = completion.tokens
            assert tokens == alone(LONG)[0][: len(tokens)] and bool(tokens) == (steps == 4)
            assert engine.unfinished == 0 and engine.run() == {}
            engine.submit(LONG)  # its id is free
            assert engine.run()["long"].tokens == alone(LONG)


def test_who_is_not_there():
    with opened("host", 60) as cache:
        engine = engine_over(cache)
        engine.submit(SHORT)
        for wrong in ("nobody", None, 5):
            with pytest.raises(InvalidArgument, match="no request .* waits, runs or is swapped"):
                engine.cancel(wrong)
        assert engine.run()["short"].tokens == alone(SHORT)
        with pytest.raises(InvalidArgument, match="no request 'short'"):
            engine.cancel("short")


def test_after_a_step_that_was_cut_off():
    """The iteration that was under way is taken back, and its tokens come all the same."""

    class Fails(FakeModel):
        wrong = True

        def __call__(self, plan):
            if self.wrong:
                raise KeyboardInterrupt
            return super().__call__(plan)

    with opened("host", 28) as cache:
        model = Fails(Store(cache))
        engine = Engine(Scheduler(cache), model, choose)
        for request in (NEVER, LONG, SHORT):
            engine.submit(request)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert engine.unfinished == 3
        engine.cancel("long")
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert engine.unfinished == 3
        model.wrong = False
        done = engine.run()
        assert done["long"].error == "cancelled" and done["short"].tokens == alone(SHORT)
        assert "larger budget" in done["never"].error and engine.unfinished == 0


@pytest.mark.parametrize("shown", [None, True, False])
def test_progress(capsys, monkeypatch, shown):
    """Once a second has passed; unless it is asked for, on a terminal only."""
    now = [0.0]

    def later():
        now[0] += 0.4
        return now[0]

    monkeypatch.setattr("time.monotonic", later)
    with opened("host", 60) as cache:
        engine_over(cache).run([SHORT, MANY], progress=shown)
    told = capsys.readouterr().err
    assert ("requests done, " in told and " running" in told) == bool(shown)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with opened("host", 60) as cache:
        engine_over(cache).run([SHORT, MANY], progress=shown)
    assert ("\r" in capsys.readouterr().err) == (shown is not False)


def test_a_request_that_does_not_fit_costs_no_prefix():
    """Prefixes that no request uses are given up for a step that is granted, not for one that is refused."""
    with opened("host", 24, max_len=96) as cache:
        engine = engine_over(cache)
        engine.run([Request("prefix", [1] * 16, 1)])
        kept = cache.stats().prefix_tokens
        assert kept >= 12
        engine.submit(Request("running", [0] * 8, 20))
        engine.step()
        engine.submit(Request("large", [0, 1] * 20, 1))
        engine.step()
        assert len(engine.scheduler.waiting) == 1 and cache.stats().prefix_tokens >= kept
        assert not [c.error for c in engine.run().values() if c.error]
