"""Traces as they are read: both formats, and each malformed row named by its line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import ROOT
from vtensor import InvalidArgument
from vtensor.replay import read_trace
from vtensor.replay.traces import PieceTokens

TRACES = ROOT.parent / "shared" / "traces"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
GOOD = "2023-11-16 18:15:46.6805900,374,44"
ROW = {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [3, 4]}


def azure(tmp_path, *lines):
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return path


def mooncake(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_azure(tmp_path):
    rows = read_trace(azure(tmp_path, GOOD, "2023-11-16 18:16:46.5805895,12,7"))
    assert [(row.prompt_tokens, row.output_tokens, row.pieces) for row in rows] == [
        (374, 44, None),
        (12, 7, None),
    ]
    assert rows[0].arrival == 0 and rows[1].arrival == pytest.approx(59.8999995, abs=1e-6)
    assert rows[0].prompt == 374


def test_mooncake(tmp_path):
    rows = read_trace(mooncake(tmp_path, ROW, ROW | {"timestamp": 500, "input_length": 512, "hash_ids": [3]}))
    assert [row.arrival for row in rows] == [0, 0.5], "by arrival, from the first on"
    assert list(rows[0].prompt) == list(range(3 * 512, 4 * 512))
    assert list(rows[1].prompt) == [*range(3 * 512, 5 * 512)][:600]


@given(
    pieces=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    cut=st.integers(0, 511),
    start=st.integers(-2000, 2000),
    stop=st.integers(-2000, 2000),
    step=st.sampled_from([None, 1, 2, -1]),
)
def test_tokens_of_pieces_are_a_sequence(pieces, cut, start, stop, step):
    whole = [piece * 512 + i for piece in pieces for i in range(512)][: len(pieces) * 512 - cut]
    tokens = PieceTokens(tuple(pieces), len(whole))
    assert len(tokens) == len(whole) and tokens[-1] == whole[-1]
    assert tokens[start:stop:step] == whole[start:stop:step]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("2023-11-16 18:15:46.68,374", "2 fields, not 3"),
        ("yesterday,374,44", "TIMESTAMP is 'yesterday'"),
        ("2023-11-16 18:15:46.68,0,44", "ContextTokens is 0"),
        ("2023-11-16 18:15:46.68,374,-4", "GeneratedTokens is '-4'"),
        ("", "0 fields"),
        ("2023-11-16 18:15:46.1e999,374,44", "TIMESTAMP is"),
        (f"2023-11-16 18:15:46.68,{'9' * 5000},44", "ContextTokens is '9+[.]"),
        (f"2023-11-16 18:15:46.68,{2**31},44", "ContextTokens is 2147483648, not .* 1 to 2,147,483,647"),
        (f"2023-11-16 18:15:46.68,{'9' * 200_000},44", "field larger than field limit"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_malformed_azure_rows(tmp_path, row, what):
    with pytest.raises(InvalidArgument, match=f"trace.csv line 3: {what}"):
        read_trace(azure(tmp_path, GOOD, row, GOOD))


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ('{"timestamp": 1', "this is not JSON"),
        ("", "this is not JSON"),
        ("[1, 2]", "a list, not an object"),
        (ROW | {"input_length": 0}, "input_length is 0"),
        (ROW | {"output_length": "5"}, "output_length is '5'"),
        ({k: v for k, v in ROW.items() if k != "output_length"}, "output_length is None"),
        (ROW | {"timestamp": -1}, "timestamp is -1"),
        (ROW | {"hash_ids": [3]}, "1 hash_ids for 600 tokens, which are 2"),
        (ROW | {"hash_ids": [3, -4]}, "hash_ids is"),
        (ROW | {"hash_ids": [3, 2**54]}, "hash_ids is .*below 2"),
        (ROW | {"timestamp": float("nan")}, "this is not JSON .*NaN"),
        (json.dumps(ROW).replace("1000", "1e999"), "timestamp is inf"),
        ("[" * 200_000, "this is not JSON .*recursion"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_malformed_mooncake_rows(tmp_path, row, what):
    with pytest.raises(InvalidArgument, match=f"trace.jsonl line 2: {what}"):
        read_trace(mooncake(tmp_path, ROW, row, ROW))


def test_the_largest_numbers(tmp_path):
    row = {"timestamp": 2**52, "input_length": 1, "output_length": 2**31 - 1, "hash_ids": [2**54 - 1]}
    (read,) = read_trace(mooncake(tmp_path, row))
    assert read.output_tokens == 2**31 - 1 and list(read.prompt) == [2**63 - 512]


def test_files_that_are_no_traces(tmp_path):
    with pytest.raises(InvalidArgument, match="line 1: the columns are"):
        (tmp_path / "other.csv").write_text("a,b,c\n1,2,3\n")
        read_trace(tmp_path / "other.csv")
    with pytest.raises(InvalidArgument, match="line 1: field larger"):
        (tmp_path / "other.csv").write_text("a" * 200_000 + ",b,c\n")
        read_trace(tmp_path / "other.csv")
    with pytest.raises(InvalidArgument, match="has no rows"):
        read_trace(azure(tmp_path))
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_trace(tmp_path / "missing.jsonl")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
        read_trace(tmp_path / "binary.csv")
    with pytest.raises(InvalidArgument, match="pass an Azure trace"):
        read_trace(tmp_path / "trace.txt")


@pytest.mark.parametrize(
    ("name", "first"),
    [("azure_llm_2023_conv.csv", (0.0, 374, 44)), ("mooncake_conversation.jsonl", (0.0, 6758, 500))],
)
def test_the_real_traces_are_read(name, first):
    if not (TRACES / name).exists():
        pytest.skip(f"{name} is not in ../shared/traces")
    rows = read_trace(TRACES / name, limit=500)
    assert len(rows) == 500
    assert (rows[0].arrival, rows[0].prompt_tokens, rows[0].output_tokens) == first
