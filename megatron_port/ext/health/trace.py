"""One timeline of many ranks: their profiler traces (Chrome's trace format) merged into one file for Perfetto.

``python -m megatron_port.ext.health.trace FOLDER`` merges the ``rank-*.json.gz`` of a folder into
``merged.json.gz``. Each rank becomes a group of processes of its own, with the phases of its steps as the first track.
Times are those of the hosts' clocks, so ranks of different hosts are as far apart as their clocks.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_port.core.io.files import open_regular, write_bytes
from megatron_port.core.io.typed_json import Natural, WrongContent, parse_json, typed

FOLDER = "profile"
MERGED = "merged.json.gz"
SPAN = 1000
"""Process numbers of the merged trace that a rank has."""
_LARGEST = 1 << 31


@dataclass(frozen=True)
class PhaseSpan:
    """A phase of a step, in nanoseconds since 1970."""

    name: str
    since: int
    until: int


@dataclass(frozen=True)
class TracedRank:
    """Rank and place that a trace is of."""

    rank: Natural
    host: str
    coords: str
    phases: tuple[PhaseSpan, ...]


@dataclass(frozen=True)
class RankTraceFile:
    """Fields of a rank's trace beside the profiler's own."""

    rank: TracedRank
    traceEvents: tuple[dict[str, Any], ...]
    baseTimeNanoseconds: int = 0


def trace_name(rank: int) -> str:
    """Return the name of a rank's trace."""
    return f"rank-{rank:05d}.json.gz"


def merge(folder: Path) -> Path:
    """Merge the traces of a folder; return the file. Raises OSError, ValueError: none there, or not ours."""
    parts = sorted(folder.glob("rank-*.json.gz"))
    if not parts:
        raise ValueError(f"{folder}: no rank-NNNNN.json.gz there")
    traces = [_read(path) for path in parts]
    origin = min(_base(trace) for trace in traces)
    events = [event for trace in traces for event in rank_events(trace, origin)]
    body = {"displayTimeUnit": "ms", "baseTimeNanoseconds": origin, "traceEvents": events}
    target = folder / MERGED
    write_bytes(target, gzip.compress(json.dumps(body).encode(), 5))
    return target


def _read(path: Path) -> dict[str, Any]:
    with open(open_regular(path, follow=True), "rb") as packed, gzip.open(packed, "rb") as stream:
        trace = parse_json(stream.read(_LARGEST))
    try:
        typed(RankTraceFile, trace)
    except WrongContent as error:
        raise ValueError(f"{path}: not a trace that `train --profile` wrote ({error})") from None
    return dict(trace)


def _base(trace: dict[str, Any]) -> int:
    """Return the time, in nanoseconds since 1970, from which a trace counts its microseconds."""
    return int(trace.get("baseTimeNanoseconds", 0))


def rank_events(trace: dict[str, Any], origin: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank's trace with times from ``origin`` on, under process numbers of its own.

    Identifiers of flows are the rank's too: an arrow between two ranks would be a mistake.
    """
    about = trace["rank"]
    rank, shift = int(about["rank"]), (_base(trace) - origin) / 1000
    processes: dict[Any, int] = {}
    named = f"rank {rank} ({about['coords']}) on {about['host']}"
    yield from _process(rank * SPAN, f"{named}: phases", rank * SPAN)
    for span in about["phases"]:
        yield {"ph": "X", "cat": "phase", "name": span["name"], "pid": rank * SPAN, "tid": 0,
               "ts": (span["since"] - origin) / 1000, "dur": (span["until"] - span["since"]) / 1000}
    for event in trace["traceEvents"]:
        event = dict(event)
        if "pid" in event:
            pid = event["pid"]
            if pid not in processes:
                processes[pid] = rank * SPAN + 1 + len(processes)
            event["pid"] = processes[pid]
        if "ts" in event and event.get("ph") != "M":
            event["ts"] = float(event["ts"]) + shift
        if "id" in event:
            event["id"] = f"{rank}.{event['id']}"
        if event.get("ph") == "M" and event.get("name") == "process_name":
            event["args"] = {"name": f"{named}: {dict(event.get('args') or {}).get('name', '')}"}
        elif event.get("ph") == "M" and event.get("name") == "process_sort_index":
            event["args"] = {"sort_index": event["pid"]}
        yield event


def _process(pid: int, name: str, order: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": order}}


def main() -> int:
    try:
        print(merge(Path(sys.argv[1])))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
