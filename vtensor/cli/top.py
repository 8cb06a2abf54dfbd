"""``python -m vtensor top``: the pools that share a budget on this machine, and what each has."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

from vtensor import _core
from vtensor._base.terminal import aligned
from vtensor._base.units import byte_text

_ANSWER_SECONDS = 0.3  # for pools to answer; a pool that does not shows its last figures
_PERIOD_SECONDS = 1.0
_BAR = 24
_CUDA = 2  # as DLPack numbers devices
_COLUMNS = ("pid", "device", "held", "active", "cached", "free", "command")


def main(*, once: bool = False, as_json: bool = False) -> int:
    """Prints the shared budgets: once, or each second until Ctrl-C. Returns the exit status."""
    while True:
        budgets, skipped = survey()
        if as_json:
            found = {"budgets": budgets, "skipped": skipped}
            print(json.dumps(found, indent=None if not once else 2), flush=True)
        else:
            terminal = sys.stdout is not None and sys.stdout.isatty()
            lines, begin = list(_lines(budgets, skipped)), ""
            if terminal:
                wide, high = shutil.get_terminal_size()
                lines = [line[:wide] for line in lines]
                if not once:  # a line more would scroll the first one away
                    lines, begin = lines[: high - 1], "\x1b[H\x1b[J"
            print(begin + "\n".join(lines), flush=True)
        if once:
            return 0
        time.sleep(_PERIOD_SECONDS)


def survey() -> tuple[list[dict[str, Any]], list[str]]:
    """The shared budgets of this user that have an open pool, in bytes, and a line for each file with the
    name of a budget that could not be read.

    What a pool holds is ``active`` (what it needs), ``cached`` (mapped without need) and ``free`` pages.
    """
    budgets, skipped = _core.survey_budgets(_ANSWER_SECONDS)
    return [
        {
            "name": budget.name,
            "limit": budget.limit,
            "held": sum(holder.held for holder in budget.holders),
            "pools": [_pool(holder) for holder in budget.holders],
        }
        for budget in budgets
    ], skipped


def _pool(holder: _core.BudgetHolder) -> dict[str, Any]:
    kind, index = holder.device
    # `held` is of a later moment than the other figures.
    free = min(holder.spare, holder.held)
    cached = min(holder.cached, holder.held - free)
    return {
        "pid": holder.process,
        "device": f"cuda:{index}" if kind == _CUDA else "cpu",
        "held": holder.held,
        "active": holder.held - cached - free,
        "cached": cached,
        "free": free,
        "command": "".join(c if c.isprintable() else "?" for c in holder.command.decode(errors="replace")),
    }


def _lines(budgets: list[dict[str, Any]], skipped: list[str]) -> Iterator[str]:
    yield from (f"skipped: {why}" for why in skipped)
    if not budgets:
        yield 'No pool on this machine shares a budget: Pool(budget=, shared_budget="name") makes one.'
    for budget in budgets:
        held = min(budget["held"], budget["limit"])
        share = held / budget["limit"]
        # The kernel does not ask before it copies a shared page for a write.
        over = f", and {byte_text(budget['held'] - held)} copied beside it" if budget["held"] > held else ""
        yield (
            f"{budget['name']}  [{'#' * round(_BAR * share):.<{_BAR}}] {byte_text(held)} of "
            f"{byte_text(budget['limit'])} ({share:.0%}){over}"
        )
        by_size = sorted(budget["pools"], key=lambda pool: (-pool["held"], pool["pid"]))
        rows = [_COLUMNS, *map(_cells, by_size)]
        for figures, row in zip(aligned([row[:-1] for row in rows], left=0), rows, strict=True):
            yield f"  {figures}  {row[-1]}"
        yield ""


def _cells(pool: dict[str, Any]) -> tuple[str, ...]:
    sizes = [byte_text(pool[column]) for column in ("held", "active", "cached", "free")]
    return str(pool["pid"]), pool["device"], *sizes, pool["command"]
