"""A pipeline's passes as a trace for Perfetto, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from megatron_port.pipeline.simulate import Span

COLOURS = {"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#eeca3b"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
Stages = Sequence[Sequence[Span]]
"""The spans of each stage; times in seconds."""


def chrome_trace(runs: dict[str, Stages]) -> str:
    """JSON of the trace-event format, which ui.perfetto.dev and chrome://tracing open.

    ``runs``: name → spans; each run is a process, each stage a thread. Times start at the run's first pass.
    """
    events: list[dict[str, object]] = []
    for pid, (name, stages) in enumerate(runs.items()):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        zero = min(span.start for spans in stages for span in spans)
        for stage, spans in enumerate(stages):
            name_of = {"name": f"stage {stage}"}
            events.append({"ph": "M", "pid": pid, "tid": stage, "name": "thread_name", "args": name_of})
            events += [
                {
                    "ph": "X", "pid": pid, "tid": stage, "name": str(span.action), "cat": NAMES[span.action.kind.value],
                    "ts": (span.start - zero) * 1e6, "dur": (span.end - span.start) * 1e6,
                    "args": {"micro_batch": span.action.micro_batch, "chunk": span.action.chunk},
                }
                for span in spans
            ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def picture(rows: Sequence[tuple[str, Stages]], *, width: int = 1100, height: int = 18) -> str:
    """An SVG of pipelines one below the other on one time axis, one line per stage; chunks after the first are darker.

    ``rows``: (title, spans). Legible on light and dark pages.
    """
    longest = max(
        max(s.end for spans in stages for s in spans) - min(s.start for spans in stages for s in spans)
        for _, stages in rows
    )
    scale, top = (width - 10) / longest, 30
    parts: list[str] = []
    for at, (kind, name) in zip(range(5, width, 140), NAMES.items()):
        parts.append(f'<rect x="{at}" y="6" width="14" height="14" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{at + 19}" y="17">{name}</text>')
    for title, stages in rows:
        parts.append(f'<text x="5" y="{top + 13}" font-weight="bold">{escape(title)}</text>')
        top += 19
        zero = min(span.start for spans in stages for span in spans)
        for spans in stages:
            parts.append(f'<rect x="5" y="{top}" width="{width - 10}" height="{height - 2}" fill="#8882"/>')
            for span in spans:
                wide = max((span.end - span.start) * scale, 0.5)
                x, shade = 5 + (span.start - zero) * scale, 0.6 if span.action.chunk else 1.0
                parts.append(
                    f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{height - 2}" stroke="#fff" '
                    f'stroke-width="0.5" fill="{COLOURS[span.action.kind.value]}" fill-opacity="{shade}"/>'
                )
                if wide > 11:
                    parts.append(
                        f'<text x="{x + wide / 2:.1f}" y="{top + height - 6}" font-size="9" fill="#000" '
                        f'text-anchor="middle">{span.action.micro_batch}</text>'
                    )
            top += height
        top += 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" height="{top}" '
        f'font-family="sans-serif" font-size="12"><style>text{{fill:#555}}</style>{"".join(parts)}</svg>\n'
    )


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
