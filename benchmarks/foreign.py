"""Record how frameworks compare with themselves on one process, by ``megatron_port.parity``.

    python -m benchmarks.foreign megatron-core --draws 30 --out benchmarks/results/foreign-megatron.jsonl

Options are drawn from the adapter's space, on 2 and on 4 ranks in turn. ``--case "4 tp=2 sp=True"`` records one layout
that is named. A line a case: options, verdict, seconds. The process exits with 1 if one of them was not equal.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_port.core.errors import PortError
from megatron_port.tools.foreign.ranks import Ranks
from megatron_port.tools.foreign.session import Session

Case = tuple[int, dict[str, Any]]


def drawn(session: Session, count: int, seed: int, fixed: Mapping[str, Any]) -> Iterator[Case]:
    """Yield legal layouts, none twice."""
    source, seen, adapter = random.Random(seed), set[str](), session.kind()
    while len(seen) < count:
        ranks = (2, 4)[len(seen) % 2]
        options = {name: source.choice(list(values)) for name, values in session.kind.space.items()}
        options = {**adapter.model, **adapter.layout, **options, **fixed}
        key = f"{ranks} {json.dumps(options, sort_keys=True)}"
        if key not in seen and not adapter.legal(options, ranks) and options != {**options, **adapter.layout}:
            seen.add(key)
            yield ranks, {name: value for name, value in options.items() if name in session.kind.space or name in fixed}


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


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework")
    parser.add_argument("--draws", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fix", nargs="*", default=[], help="options that are not drawn: name=value")
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    unequal = 0
    with Ranks() as running, given.out.open("a") as out:
        session = Session(given.framework, running)
        _, fixed = parsed(f"0 {' '.join(given.fix)}")
        for case in [*map(parsed, given.case), *drawn(session, given.draws, given.seed, fixed)]:
            line = recorded(session, case)
            unequal += not line["equal"]
            print(json.dumps({"framework": given.framework, **line}), file=out, flush=True)
            print("equal" if line["equal"] else "DIFFERENT", *case, line.get("failed", ""), flush=True)
            for finding in line.get("findings", []):
                print("  ", finding["text"])
    return int(bool(unequal))


if __name__ == "__main__":
    sys.exit(main())
