"""What ``doctor`` finds, a line each, and how it prints it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_port.core.io.redact import redact


@dataclass(frozen=True)
class CheckResult:
    """One line of the report."""

    section: str
    name: str
    value: str
    status: str = "ok"
    """ok | note (could be better) | slow (works, by a slower path or a build at run time) | wrong (a run would fail)"""
    remedy: str = ""


def strictly(findings: Sequence[CheckResult]) -> list[CheckResult]:
    """Return the same results, with what is slow called wrong."""
    return [replace(f, status="wrong") if f.status == "slow" else f for f in findings]


def render(findings: Sequence[CheckResult]) -> str:
    """Return the report as text: a table by section, then what needs attention."""
    lines: list[str] = []
    width = max(len(f.name) for f in findings)
    marks = {"ok": " ", "note": "~", "slow": "~", "wrong": "!"}
    for i, f in enumerate(findings):
        if i == 0 or findings[i - 1].section != f.section:
            lines += [""] * bool(i) + [f.section]
        lines.append(f"{marks[f.status]} {f.name:<{width}}  {f.value}")
        if f.remedy:
            lines.append(f"  {'':<{width}}  → {f.remedy}")
    wrong = sum(f.status == "wrong" for f in findings)
    notes = sum(f.status in ("note", "slow") for f in findings)
    state = f"{wrong} wrong (!)" if wrong else "nothing is wrong"
    return redact("\n".join([*lines, "", f"{state}; {notes} could be better (~)" if notes else state]))
