"""Traces of real requests: the arrival, the length and the shared prefix of each.

The suffix of the file selects one of two formats: the Azure LLM inference trace 2023 (``.csv``: Patel et al.,
"Splitwise", ISCA 2024) or Mooncake's (``.jsonl``: Qin et al., FAST 2025).
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NoReturn, TextIO, overload

from vtensor._base.arguments import type_text
from vtensor.errors import InvalidArgument

PIECE_TOKENS = 512
"""Tokens that one of Mooncake's hash ids stands for."""

_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_MOST_TOKENS = 2**31 - 1
_LATEST = 2**53  # milliseconds; a float is exact up to this
_PIECES = 2**63 // PIECE_TOKENS  # so that token ids have 64 bits


class PieceTokens(Sequence[int]):
    """A prompt's token ids, made from its hash ids. Equal hash ids give equal tokens.

    Tokens are made when they are read, so that a trace of 145 million tokens fits into memory.
    """

    def __init__(self, pieces: tuple[int, ...], length: int) -> None:
        self._pieces, self._length = pieces, length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if not isinstance(index, slice):
            place = range(self._length)[index]
            return self._pieces[place // PIECE_TOKENS] * PIECE_TOKENS + place % PIECE_TOKENS
        places = range(self._length)[index]
        if places.step != 1:
            return [self[place] for place in places]
        first = places.start // PIECE_TOKENS
        tokens: list[int] = []
        for piece in self._pieces[first : -(-places.stop // PIECE_TOKENS)]:
            tokens.extend(range(piece * PIECE_TOKENS, (piece + 1) * PIECE_TOKENS))
        return tokens[places.start - first * PIECE_TOKENS : places.stop - first * PIECE_TOKENS]


@dataclass(frozen=True)
class Row:
    """One request of a trace."""

    arrival: float
    """Seconds after the first request."""
    prompt_tokens: int
    output_tokens: int
    pieces: tuple[int, ...] | None = None
    """Mooncake's hash ids; None if the trace has none."""

    @property
    def prompt(self) -> PieceTokens | int:
        """The token ids, or their number if the trace has no hash ids."""
        return self.prompt_tokens if self.pieces is None else PieceTokens(self.pieces, self.prompt_tokens)


def read_trace(path: str | os.PathLike[str], limit: int | None = None) -> list[Row]:
    """The rows of a trace file in order of arrival. ``limit`` reads only the first rows of the file.

    Raises:
        InvalidArgument: if the file has neither format, cannot be read or has no rows, or if a row is
            malformed.
    """
    file = Path(path)
    readers: dict[str, Callable[[Path], Iterator[Row]]] = {".csv": _azure, ".jsonl": _mooncake}
    if file.suffix not in readers:
        raise InvalidArgument(f"[replay] {file}: pass an Azure trace (.csv) or a Mooncake trace (.jsonl)")
    try:
        rows = list(islice(readers[file.suffix](file), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"[replay] {file} cannot be read: {error}") from error
    if not rows:
        raise InvalidArgument(f"[replay] {file} has no rows: nothing to replay")
    start = min(row.arrival for row in rows)
    moved = [Row(row.arrival - start, row.prompt_tokens, row.output_tokens, row.pieces) for row in rows]
    return sorted(moved, key=lambda row: row.arrival)


def _azure(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        lines = _lines(path, file)
        _, header = next(lines, ("", []))
        if header != _AZURE_COLUMNS:
            raise InvalidArgument(
                f"[replay] {path} line 1: the columns are {brief(header)}, not {_AZURE_COLUMNS}: pass an "
                "Azure trace"
            )
        for place, fields in lines:
            if len(fields) != len(header):
                raise _malformed(place, f"{len(fields)} fields, not {len(header)}")
            prompt, output = (_count(place, header[i], _number(fields[i])) for i in (1, 2))
            yield Row(_seconds(place, fields[0]), prompt, output)


def _lines(path: Path, file: TextIO) -> Iterator[tuple[str, list[str]]]:
    """The place of each line of a CSV file and its fields."""
    lines = csv.reader(file)
    try:
        for fields in lines:
            yield f"{path} line {lines.line_num}", fields
    except csv.Error as error:  # a field over 131,072 characters
        raise _malformed(f"{path} line {lines.line_num}", str(error)) from error


def _mooncake(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, 1):
            place = f"{path} line {line}"
            try:
                row = json.loads(text, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise _malformed(place, f"this is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise _malformed(place, f"{type_text(type(row))}, not an object")
            prompt = _count(place, "input_length", row.get("input_length"))
            pieces: Any = row.get("hash_ids")
            when: Any = row.get("timestamp")
            needed = -(-prompt // PIECE_TOKENS)
            if not isinstance(pieces, list) or not all(
                type(piece) is int and 0 <= piece < _PIECES for piece in pieces
            ):
                what = f"hash_ids is {brief(pieces)}, not a list of whole numbers below 2**54"
                raise _malformed(place, what)
            if len(pieces) != needed:
                raise _malformed(place, f"{len(pieces)} hash_ids for {prompt} tokens, which are {needed}")
            if type(when) not in (int, float) or not 0 <= when < _LATEST:
                raise _malformed(place, f"timestamp is {brief(when)}, not milliseconds")
            output = _count(place, "output_length", row.get("output_length"))
            yield Row(when / 1000, prompt, output, tuple(pieces))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it has no {name}")


def _number(text: str) -> int | str:
    # The bound keeps int() from refusing thousands of digits. No count has as many.
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text


def _count(place: str, name: str, value: Any) -> int:
    if type(value) is not int or not 0 < value <= _MOST_TOKENS:
        raise _malformed(place, f"{name} is {brief(value)}, not a whole number from 1 to {_MOST_TOKENS:,}")
    return value


def _seconds(place: str, text: str) -> float:
    try:
        when = datetime.fromisoformat(text)
        if when.tzinfo is None:  # not in this machine's zone, whose clocks may be put back in the trace
            when = when.replace(tzinfo=UTC)
        return when.timestamp()
    except (ValueError, OverflowError) as error:
        raise _malformed(place, f"TIMESTAMP is {brief(text)}, not a date and time") from error


def _malformed(place: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"[replay] {place}: {what}: repair or remove the row")
