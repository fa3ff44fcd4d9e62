"""Record how frameworks compare with themselves on one process, by ``megatron_port.parity``.

    python -m benchmarks.foreign megatron-core --draws 100 --out benchmarks/results/foreign-megatron.jsonl

Options are drawn from the adapter's space, on 2 and on 4 ranks in turn, until the record has as many draws, none twice.
``--case "4 tp=2 sp=True"`` records one layout that is named. A line a case: options, verdict, seconds.

A draw that differs and meets the conditions of a known finding (:data:`FINDINGS`) is run once more with the finding's
cause patched, or its option off. It counts as that finding's if it is equal then. ``--again`` does so with differing
draws that the record has. The process exits with 1 if another case was not equal.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_port.core.errors import PortError
from megatron_port.tools.foreign.ranks import Ranks
from megatron_port.tools.foreign.session import Session

Case = tuple[int, dict[str, Any]]
FIXED = str(Path(__file__).with_name("foreign_fixed.py"))


@dataclass(frozen=True)
class Known:
    """A finding that was shown to be real; numbers are those of benchmarks/evidence/parity-for-others.md."""

    number: int
    meets: Callable[[Mapping[str, Any]], bool]
    """Has a layout what the finding needs?"""
    without: Mapping[str, Any]
    """Options that take its cause away."""
    adapter: str = FIXED


FINDINGS: Mapping[str, tuple[Known, ...]] = {
    "megatron-core": (
        Known(1, lambda o: o["tp"] > 1 and o["sp"] and o["per_token"] and o["balance"] != "none", {"fixed": 1}),
        Known(4, lambda o: o["pp"] == 2 and o["vpp"] > 1, {"batch_p2p": False}),
    ),
}


def key_of(ranks: int, options: Mapping[str, Any]) -> str:
    """Return what makes a draw another one."""
    return f"{ranks} {json.dumps(options, sort_keys=True)}"


def drawn(session: Session, count: int, seed: int, fixed: Mapping[str, Any], done: set[str]) -> Iterator[Case]:
    """Yield legal layouts, none twice and none of ``done``, until there are ``count`` with those."""
    source, adapter = random.Random(seed), session.kind()
    seen = set(done)
    while len(seen) < count:
        ranks = (2, 4)[len(seen) % 2]
        options = {name: source.choice(list(values)) for name, values in session.kind.space.items()} | dict(fixed)
        whole = {**adapter.model, **adapter.layout, **options}
        key = key_of(ranks, options)
        if key not in seen and not adapter.legal(whole, ranks) and whole != {**whole, **adapter.layout}:
            seen.add(key)
            yield ranks, options


def parsed(words: str) -> Case:
    """Return "4 tp=2 sp=True" as a case."""
    ranks, *pairs = words.split()
    options = dict(pair.split("=", 1) for pair in pairs)
    return int(ranks), {name: _value(text) for name, text in options.items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text.replace("True", "true").replace("False", "false"))
    except json.JSONDecodeError:
        return text


def recorded(session: Session, case: Case) -> dict[str, Any]:
    """Run a case; return its line."""
    ranks, options = case
    start = time.monotonic()
    line: dict[str, Any] = {"ranks": ranks, "options": options}
    try:
        line |= session.compare(options, ranks, seconds=300).as_json()
    except PortError as error:
        line |= {"equal": False, "failed": str(error)}
    return {**line, "seconds": round(time.monotonic() - start, 1)}


def explained(framework: str, running: Ranks, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``finding`` and ``without`` (the verdict with its cause gone) if a known one explains a case; else {}."""
    for known in FINDINGS.get(framework, ()):
        if not known.meets(line["options"]):
            continue
        again = recorded(Session(known.adapter, running), (line["ranks"], {**line["options"], **known.without}))
        if again["equal"]:
            told = {name: again[name] for name in ("equal", "worst", "compared", "seconds")}
            return {"finding": known.number, "without": {"options": dict(known.without), **told}}
    return {}


def said(line: Mapping[str, Any]) -> str:
    """Return words for a case's end."""
    if line["equal"]:
        return "equal"
    return f"of finding {line['finding']}" if "finding" in line else "DIFFERENT"


def again(framework: str, running: Ranks, out: Path) -> int:
    """Explain draws of the record that differ; return how many stay unexplained."""
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    left = 0
    for line in lines:
        if line["kind"] == "drawn" and not line["equal"] and "finding" not in line:
            line |= explained(framework, running, line)
            left += "finding" not in line
            print(said(line), line["ranks"], line["options"], flush=True)
    out.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return left


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework")
    parser.add_argument("--draws", type=int, default=0, help="of the record, with those that it has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fix", nargs="*", default=[], help="options that are not drawn: name=value")
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--again", action="store_true", help="run differing draws of the record without known causes")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    lines = [json.loads(text) for text in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {key_of(line["ranks"], line["options"]) for line in lines if line["kind"] == "drawn"}
    with Ranks() as running:
        unequal = again(given.framework, running, given.out) if given.again else 0
        session, (_, fixed) = Session(given.framework, running), parsed(f"0 {' '.join(given.fix)}")
        cases = [("named", case) for case in map(parsed, given.case)]
        cases += [("drawn", case) for case in drawn(session, given.draws, given.seed, fixed, done)]
        for kind, case in cases:
            line = {"kind": kind, "framework": given.framework, **recorded(session, case)}
            if kind == "drawn" and not line["equal"]:
                line |= explained(given.framework, running, line)
            unequal += not line["equal"] and "finding" not in line
            with given.out.open("a") as out:
                print(json.dumps(line), file=out)
            print(said(line), *case, line.get("failed", ""), flush=True)
            for finding in line.get("findings", []):
                print("  ", finding["text"])
    return int(bool(unequal))


if __name__ == "__main__":
    sys.exit(main())
