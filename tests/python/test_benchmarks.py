"""The harness's statistics, and that every benchmark runs and gives the one result format. Counts are gated
here, times nowhere."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import vtensor
from support import ROOT, run_process

sys.path.append(str(ROOT))

from benchmarks import BENCHMARKS, __main__, harness  # noqa: E402
from benchmarks.harness import Bar, Figure, Settings, Skipped, Spread  # noqa: E402


def test_quantiles_are_linear_between_neighbours():
    assert [harness.quantile([1.0, 2.0, 4.0], q) for q in (0, 0.25, 0.5, 0.75, 1)] == [1, 1.5, 2, 3, 4]
    assert harness.quantile([7.0], 0.9) == 7
    with pytest.raises(ValueError):
        harness.quantile([], 0.5)


def test_a_spread_is_the_median_between_two_percentiles():
    values = [float(i) for i in reversed(range(101))]
    assert Spread.of(values) == Spread(50, 10, 90)
    assert Spread.of(iter([1.0, 1000.0, 2.0])).median == 2


def test_comparisons_are_made_inside_each_round():
    """A machine that is ten times slower in one round changes no ratio."""
    baseline = [1.0, 10.0, 1.0, 1.0]
    ours = [2.0, 20.0, 2.0, 2.0]
    assert harness.slowdown("", "", ours, baseline).value == Spread(2, 2, 2)
    assert harness.speedup("", "", ours, baseline).value == Spread(0.5, 0.5, 0.5)
    assert harness.excess("", "", [3e-6, 5e-6], [1e-6, 3e-6]).value.median == pytest.approx(2)
    figure = harness.slowdown("", "", ours, baseline, control=[1.1, 11.0, 1.1, 1.1])
    assert figure.control.median == pytest.approx(1.1)
    assert (figure.ours.median, figure.baseline.median) == (2, 1)
    with pytest.raises(ValueError):
        harness.slowdown("", "", [1.0], baseline)


def test_a_bar_is_held_by_its_limit_and_judges_the_median():
    assert Bar(2).holds(2) and Bar(2).holds(1) and not Bar(2).holds(2.01)
    assert Bar(2, at_least=True).holds(2) and not Bar(2, at_least=True).holds(1.99)
    spread = Spread(1.0, 0.5, 9.0)
    assert Figure("", "", "x", spread, bar=Bar(1)).passed is True
    assert Figure("", "", "x", spread, bar=Bar(0.9)).passed is False
    assert Figure("", "", "x", spread).passed is None


def test_samples_are_interleaved_in_changing_order():
    order: list[str] = []

    def sample(name: str) -> float:
        order.append(name)
        return float(len(order))

    taken = harness.interleave({name: lambda name=name: sample(name) for name in "abc"}, rounds=20, warmup=2)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == 22 and all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 3
    # Every sample of the rounds that count, at its place, and none of the warm-up.
    assert {len(values) for values in taken.values()} == {20}
    assert sorted(v for values in taken.values() for v in values) == list(range(7, 67))
    for at in range(20):
        assert {(taken[name][at] - 1) // 3 for name in "abc"} == {at + 2}


def fake_benchmark(monkeypatch, run) -> None:
    monkeypatch.setattr(__main__.importlib, "import_module", lambda name: SimpleNamespace(run=run))


def test_a_benchmark_that_breaks_or_cannot_run_stops_no_other(monkeypatch):
    def broken(settings):
        raise KeyError("k")

    def skipped(settings):
        raise Skipped("no compiler")

    fake_benchmark(monkeypatch, broken)
    assert __main__.run_one("extend", Settings()).error == "KeyError: 'k'"
    fake_benchmark(monkeypatch, skipped)
    outcome = __main__.run_one("extend", Settings())
    assert (outcome.skipped, outcome.error, list(outcome.figures)) == ("no compiler", None, [])


@pytest.mark.parametrize(("value", "counted", "code"), [(1, True, 0), (3, True, 1), (3, False, 0)])
def test_the_command_fails_where_a_count_misses_its_bar_and_not_for_a_time(
    monkeypatch, capsys, value, counted, code
):
    figure = Figure("a", "b", "x", Spread(value, value, value), bar=Bar(2), counted=counted)
    fake_benchmark(monkeypatch, lambda settings: [figure])
    assert __main__.main(["--only", "extend"]) == code
    assert ("MISS" in capsys.readouterr().out) == (value == 3)


def test_results_are_saved_where_asked_and_never_those_of_a_quick_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(__main__, "RESULTS", tmp_path / "results")
    fake_benchmark(monkeypatch, lambda settings: [harness.count("a", "b", 1, "calls")])
    with pytest.raises(SystemExit):
        __main__.main(["--quick", "--save"])
    assert __main__.main(["--only", "extend", "--save"]) == 0
    written, table = sorted((tmp_path / "results").iterdir())
    date = json.loads(written.read_text())["date"]
    assert (written.name, table.name) == (f"cpu-{date}.json", f"cpu-{date}.txt")
    assert table.read_text() in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    ran = []
    fake_benchmark(monkeypatch, ran.append)
    for option in ("--json", "--table"):
        with pytest.raises(SystemExit) as refused:
            __main__.main(["--only", "extend", option, str(tmp_path / "none" / "file")])
        assert refused.value.code == 2 and not ran
        assert "cannot be written: name a file in a folder" in capsys.readouterr().err


def test_results_are_there_after_each_benchmark(monkeypatch, tmp_path, capsys):
    as_json, table = tmp_path / "figures.json", tmp_path / "figures.txt"
    seen = []

    def run(settings):
        written = json.loads(as_json.read_text())["benchmarks"] if as_json.exists() else []
        seen.append([one["name"] for one in written])
        assert table.exists() == as_json.exists()
        return [harness.count("a", "b", 1, "calls")]

    fake_benchmark(monkeypatch, run)
    only = ["--only", "extend", "--only", "append", "--only", "growth"]
    assert __main__.main([*only, "--json", str(as_json), "--table", str(table)]) == 0
    assert seen == [[], ["extend"], ["extend", "append"]]
    assert table.read_text() == capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == [as_json, table]


@pytest.mark.slow
@pytest.mark.seconds(300)
def test_every_benchmark_runs_and_every_count_holds_its_bar(tmp_path, subtests):
    """All of them, as a user runs them."""
    written = tmp_path / "results.json"
    # The vtensor that the tests use, also where another lies in the current folder.
    paths = [str(Path(vtensor.__file__).parents[1]), str(ROOT)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "benchmarks", "--quick", "--json", written]
    finished = run_process(*command, cwd=ROOT, env=environment, timeout=280)
    assert written.exists(), finished.err
    assert str(ROOT) not in written.read_text(), "nothing says where things lie"
    benchmarks = json.loads(written.read_text())["benchmarks"]
    assert [benchmark["name"] for benchmark in benchmarks] == list(BENCHMARKS)
    for benchmark in benchmarks:
        with subtests.test(benchmark["name"]):
            assert benchmark["error"] is None, finished.err
            if benchmark["skipped"]:
                pytest.skip(benchmark["skipped"])
            assert benchmark["figures"] and benchmark["seconds"] < 30
            for figure in benchmark["figures"]:
                assert figure["name"] and figure["against"] and figure["unit"]
                for spread in (figure["value"], figure["control"], figure["ours"], figure["baseline"]):
                    assert spread is None or spread["p10"] <= spread["median"] <= spread["p90"]
                assert (figure["passed"] is None) == (figure["bar"] is None or not figure["counted"])
                assert not figure["counted"] or figure["passed"] is not False, finished.out
