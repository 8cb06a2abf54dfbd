"""A replay whose prompts are computed band by band where there is no room for them."""

from __future__ import annotations

import json

import pytest

from vtensor.__main__ import main
from vtensor.errors import InvalidArgument
from vtensor.replay import PREDICTORS, Row, Server, model_shape, open_cache, replay
from vtensor.serving import Request

SHAPE = model_shape("8x2x64")
PAGE = 16 * SHAPE.layer_bytes  # 16 tokens of a layer's K and V
ROWS = [Row(0.02 * i, 200 + 10 * (i % 7), 30) for i in range(40)]
ROOM = 8 * 240  # tokens


def served(policy, rows=ROWS, predictor="histogram", **options):
    server = Server(
        shape=SHAPE,
        memory=ROOM * SHAPE.token_bytes,
        max_batch=32,
        max_len=512,
        page_size=PAGE,
        layer_group=8,
        lookahead=8,
        bands=4,
    )
    with open_cache(policy, server) as cache:
        return replay(
            policy,
            cache,
            rows,
            token_bytes=SHAPE.token_bytes,
            predictor=PREDICTORS[predictor](),
            **options,
        )


@pytest.mark.parametrize("predictor", list(PREDICTORS))
def test_first_tokens_come_earlier_in_the_same_memory(predictor):
    first_come, layered = served("vtensor"), served("layerkv", predictor=predictor)
    for result in (first_come, layered):
        assert result.finished == len(ROWS) and result.failed == 0
        assert result.output_tokens == 30 * len(ROWS)
    assert layered.ttft_p99 < first_come.ttft_p99
    assert layered.tpot_mean > first_come.tpot_mean, "the wait has to be somewhere"


def test_where_all_fits_nothing_changes():
    rows = [Row(2.0 * i, 200, 10) for i in range(5)]
    first_come, layered = served("vtensor", rows), served("layerkv", rows)
    assert layered.ttfts == first_come.ttfts and layered.tpots == first_come.tpots


def test_copies_take_the_time_that_their_bandwidth_says():
    from vtensor.replay import ServiceModel

    slow = ServiceModel(copy_bytes_per_second=1e6)
    assert served("layerkv", service=slow).seconds > 1.2 * served("layerkv").seconds


def test_predictors_say_what_their_names_do():
    request = Request("a", 8, 100)
    truth, bad = PREDICTORS["truth"](), PREDICTORS["bad"]()
    truth.observe(request, 5)
    bad.observe(request, 5)
    assert truth.left(request, 30) == 70 and bad.left(request, 30) == 1000


def test_the_command_line(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [
        f"2023-11-16 18:15:{i:02}.0,{row.prompt_tokens},{row.output_tokens}" for i, row in enumerate(ROWS)
    ]
    trace.write_text("\n".join(lines))
    arguments = [
        "replay",
        str(trace),
        "--model",
        "8x2x64",
        "--memory",
        "8MiB",
        "--page-size",
        "64KiB",
        "--json",
    ]
    assert main([*arguments, "--policy", "layerkv", "--bands", "4", "--predictor", "truth"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["policy"] for result in results] == ["layerkv"] and results[0]["finished"] == len(ROWS)
    for bands in ("2", "5"):
        assert main([*arguments, "--policy", "layerkv", "--bands", bands]) == 2
        assert "bands" in capsys.readouterr().err


def test_bands_have_to_divide_the_layers():
    server = Server(
        shape=SHAPE, memory=1 << 24, max_batch=4, max_len=64, page_size=PAGE, layer_group=8, bands=3
    )
    with pytest.raises(InvalidArgument, match=r"3 bands of 8 layers"):
        with open_cache("layerkv", server):
            pass
