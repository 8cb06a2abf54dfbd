"""The result as it stands: a JSON document, the same as text, and the recording of the driver's answers."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import rewrite, today

from . import QUESTIONS
from .session import number

REHEARSAL = "REHEARSAL on a machine without a GPU, over the simulated libcuda: no figure here is a GPU's."


class Result:
    """Everything found so far. ``save()`` after each question: what was found is not lost with the rest."""

    def __init__(
        self, folder: Path, machine: dict[str, Any], rehearsal: bool, only: Collection[int] = ()
    ) -> None:
        date = today()
        name = re.sub(r"[^a-z0-9]+", "-", str(machine.get("gpu", "gpu")).lower()).strip("-")
        stem = f"{'rehearsal' if rehearsal else name}-{date}"
        if only:  # beside what an earlier call found, and not in its place
            stem += f"-only-{'-'.join(map(str, sorted(only)))}"
        self._stem = folder / stem
        self.document: dict[str, Any] = {
            "schema": 1,
            "rehearsal": rehearsal,
            "date": date,
            "machine": machine,
            "questions": [],
        }
        self._calls: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def paths(self) -> list[Path]:
        return [Path(f"{self._stem}{end}") for end in (".json", ".md", "-driver.jsonl")]

    def go_on(self) -> None:
        """Takes over what an earlier call of the same day wrote, if it did."""
        as_json, _, recording = self.paths
        if as_json.exists():
            self.document["questions"] = json.loads(as_json.read_text())["questions"]
        if recording.exists():
            self._calls = [json.loads(line) for line in recording.read_text().splitlines()[1:]]

    def add(
        self,
        number: int,
        text: str,
        status: str,
        seconds: float,
        findings: Sequence[dict[str, Any]],
        error: str = "",
    ) -> None:
        """`status`: answered, partial (it ended early), failed or not reached."""
        without_kind = [{k: v for k, v in found.items() if k != "kind"} for found in findings]
        by_kind: dict[str, list[Any]] = {kind: [] for kind in ("answer", "figure", "fact", "skipped", "call")}
        for found, rest in zip(findings, without_kind, strict=True):
            by_kind[found["kind"]].append(rest)
        self._calls += by_kind["call"]
        self.document["questions"].append(
            {
                "number": number,
                "question": text,
                "status": status,
                "seconds": round(seconds, 1),
                "error": error,
                "answers": [answer["text"] for answer in by_kind["answer"]],
                "figures": by_kind["figure"],
                "facts": by_kind["fact"],
                "skipped": by_kind["skipped"],
            }
        )

    def save(self) -> None:
        as_json, as_text, recording = self.paths
        rewrite(as_json, json.dumps(self.document, indent=1) + "\n")
        rewrite(as_text, table(self.document))
        if self._calls:
            facts = {fact["name"]: fact["value"] for q in self.document["questions"] for fact in q["facts"]}
            head = {
                "recording": 1,
                "rehearsal": self.document["rehearsal"],
                "granularity": facts.get("granularity"),
                "machine": self.document["machine"],
            }
            rewrite(recording, "".join(json.dumps(line) + "\n" for line in (head, *self._calls)))


def table(document: dict[str, Any]) -> str:
    """The document as Markdown: the answers first, then every figure with its unit and method."""
    lines = [f"# {document['machine'].get('gpu', 'no GPU')}, {document['date']}", ""]
    if document["rehearsal"]:
        lines += [f"**{REHEARSAL}**", ""]
    lines += [", ".join(f"{key} {value}" for key, value in document["machine"].items()), "", "## Answers", ""]
    asked = {question["number"]: question for question in document["questions"]}
    for planned in sorted(QUESTIONS, key=lambda question: question.number):
        question = asked.get(planned.number)
        lines.append(f"{planned.number}. {planned.text}")
        if question is None:
            lines.append("   - not asked")
            continue
        lines += [f"   - {answer}" for answer in question["answers"]]
        if question["status"] != "answered":
            lines.append(f"   - *{question['status']}* {question['error']}".rstrip())
    for question in sorted(document["questions"], key=lambda question: question["number"]):
        lines += ["", f"## {question['number']}. {question['question']}", ""]
        lines.append(f"{question['status']}, {question['seconds']} s")
        lines += _figures(question["figures"])
        lines += [""] if question["facts"] or question["skipped"] else []
        for fact in question["facts"]:
            lines.append(
                f"- {fact['name']}: {fact['value']}" + (f" ({fact['method']})" if fact["method"] else "")
            )
        lines += [f"- {skipped['name']}: skipped, {skipped['reason']}" for skipped in question["skipped"]]
    return "\n".join(lines) + "\n"


def _figures(figures: Sequence[dict[str, Any]]) -> list[str]:
    if not figures:
        return []
    lines = ["", "| | median | p10 | p90 | p99 | n | control [p10, p90] | how |", "| --- " * 8 + "|"]
    for figure in figures:
        control = figure.get("control")
        shown = (
            f"{number(control['median'])} [{number(control['p10'])}, {number(control['p90'])}]"
            if control
            else ""
        )
        cells = [
            figure["name"],
            f"{number(figure['median'])} {figure['unit']}",
            *(number(figure[quantile]) for quantile in ("p10", "p90", "p99")),
            str(figure["n"]),
            shown,
            figure["method"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
