"""``plan --report``: a plan as one HTML file with inline SVG; no network, no script, light and dark."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from megatron_port.config.schema import RunConfig
from megatron_port.errors import EnvironmentFault
from megatron_port.plan.gantt import intervals
from megatron_port.plan.pictures import heat_map, memory_bars, pipeline_picture, tornado, waterfall
from megatron_port.plan.search import options_of, search
from megatron_port.plan.sensitivity import SHARE, choice_bars, machine_bars
from megatron_port.plan.studies import RATIO, Planned, Study, planned, studies
from megatron_port.plan.svg import Series, chart
from megatron_port.plan.text import explain, render
from megatron_port.plan.verdict import Plan
from megatron_port.runtime.permissions import file_mode

SHOWN_STAGES, SHOWN_MICRO_BATCHES = 16, 12
"""Limits of the pipeline's picture: beyond them, passes are too small to be seen."""

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#23262e;--soft:#6a7080;--rule:#dfe3ea;--heat:#1f6f8b;--onheat:#fff;
--idle:#eef0f4;--total:#3b4252;--limit:#c0392b;--good:#1e7d4f;--bad:#c0392b;--c0:#2f6f9f;--c1:#d1495b;--c2:#edae49;
--c3:#66a182;--c4:#8d6a9f;--c5:#7a7d85;--c6:#00798c;--c7:#c77d4f}
@media(prefers-color-scheme:dark){:root{--paper:#16181d;--ink:#e4e7ee;--soft:#98a0b0;--rule:#303540;--heat:#4fb3cf;
--onheat:#0d1216;--idle:#22262e;--total:#aeb6c6;--limit:#ff7b6b;--good:#5fd39a;--bad:#ff7b6b;--c0:#5ea3d6;--c1:#ec7f8d;
--c2:#f2c46d;--c3:#8cc7a8;--c4:#b596c7;--c5:#a4a8b2;--c6:#4fb8c9;--c7:#e0a076}}
body{background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:980px;
padding:24px 20px 60px}
h1{font-size:22px;margin:0 0 4px}h2{font-size:17px;margin:34px 0 4px}h3{font-size:14px;margin:10px 0 2px}
p{margin:2px 0 10px;color:var(--soft)}b.good{color:var(--good)}b.bad{color:var(--bad)}
pre{font:12.5px/1.45 ui-monospace,monospace;overflow-x:auto;background:var(--idle);padding:12px;border-radius:6px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--ink);font:12px system-ui,sans-serif}
svg text.axis{fill:var(--soft)}svg text.small{font-size:11px}svg text.strong{font-weight:600}
svg text.onheat{fill:var(--onheat);font-weight:600}svg text.cellmark{font-size:11px}
line.grid{stroke:var(--rule)}line.rule{stroke:var(--soft);stroke-dasharray:3 3}
line.limit{stroke:var(--limit);stroke-width:2;stroke-dasharray:7 4}line.hatch{stroke:var(--rule);stroke-width:6}
rect.cell{stroke:var(--rule)}rect.frame{stroke:var(--ink)}path.curve{fill:none;stroke-width:2}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(400px,1fr));gap:6px 26px}
"""


@dataclass(frozen=True)
class Measured:
    """Points that were measured beside a planned study: (x, hardware TFLOP/s of a device, fraction of the first)."""

    points: Sequence[tuple[float, float, float]] = ()


def section(title: str, words: str, *bodies: str) -> str:
    """A heading, a sentence, and what follows."""
    return f"<section><h2>{escape(title)}</h2><p>{escape(words)}</p>{''.join(bodies)}</section>"


def html(title: str, body: Sequence[str]) -> str:
    """A whole page."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width,initial-scale=1"><title>{escape(title)}</title><style>{STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def study_picture(study: Study, found: Sequence[Planned], measured: Measured | None = None) -> str:
    """One study: rate of a device (scaling: efficiency) over its x; hollow points do not fit the device."""
    scaling = study.name in ("weak", "strong")
    points = [(p.x, p.efficiency if scaling else p.tflops) for p in found]
    series = [Series("planned", points, hollow=[not p.fits for p in found], dashed=measured is not None)]
    if measured is not None:
        series.append(Series("measured", [(x, share if scaling else rate) for x, rate, share in measured.points]))
    body = chart(
        series, x_label=study.x_label, y_label="of the smallest" if scaling else "hardware TFLOP/s per device",
        label=study.title, log_x=True, percent=scaling, least=0.8 if scaling else 0.0,
    )
    return f"<div><h3>{escape(study.title)}</h3><p>{escape(study.says)}</p>{body}</div>"


def report_page(config: RunConfig, plan: Plan) -> str:
    """The page of a plan."""
    case, machine = plan.case, plan.machine
    options = options_of(config, case)
    found = search(case, machine, options, keep_unfit=True)
    verdict = ("good", "fits") if plan.fits else ("bad", "does not fit")
    head = [
        f"<h1>{escape(plan.name)}: {plan.parameters:,} parameters on {case.world} "
        f"{escape(machine.cluster.device_label)}s of {escape(machine.cluster.name)}</h1>",
        f'<p><b class="{verdict[0]}">{verdict[1]}</b> · {escape(case.label())} · {plan.step.seconds:.4g} s per step · '
        f"model {plan.step.model_tflops:.4g} TFLOP/s per device (MFU {plan.step.mfu:.1%}), hardware "
        f"{plan.step.hardware_tflops:.4g} (HFU {plan.step.hfu:.1%}) · {plan.budget.days:.3g} days, "
        f"{plan.budget.node_hours:,.0f} node-hours for {plan.budget.tokens:.4g} tokens</p>",
    ]
    devices = max(4 * case.world, machine.cluster.gpus_per_node)
    made = {s.name: (s, planned(s, machine)) for s in studies(case, devices=devices, tensor=options.tensor)}
    scaling = [study_picture(*made[n]) for n in ("weak", "strong") if n in made]
    observed = [study_picture(*made[n]) for n in ("tensor", "micro-batches", "stages", "ratio") if n in made]
    body = [
        *head,
        section("Layouts", f"The best of every tensor and pipeline parallel size on {case.world} devices for a batch "
                f"of {case.global_batch}; micro-batch, recompute and sequence parallelism by the planner. The "
                "run's own pair is framed.", heat_map(found, case, machine)),
        section("Memory by stage", "Of one rank at its peak, against what a device has.",
                memory_bars(plan.memory, plan.limit)),
        section("Time of a step", "On the busiest stage; the parts add up.", waterfall(plan.step)),
        *_pipeline(plan),
        section("Scaling", "Planned, more or fewer replicas of this layout; hollow points do not fit.",
                _beside(scaling)) if scaling else "",
        section("What the time hangs on", f"Change of the step's time: left, a rate of the machine {SHARE:.0%} lower "
                "or higher; right, one choice of the layout the next smaller or larger that fits (devices: their "
                "product with the time).", _beside([
                    f"<div><h3>the machine</h3>{tornado(machine_bars(case, machine), label='the machine')}</div>",
                    f"<div><h3>the layout</h3>{tornado(choice_bars(case, machine, found), label='the layout')}</div>",
                ])),
        section("The paper's observations, by the planner", "Dash et al., arXiv 2312.12705, III.1 to III.4, for this "
                f"model on this cluster (up to {devices:,} devices; the last with {RATIO} micro-batches per stage). "
                "Hollow points do not fit.", _beside(observed)) if observed else "",
        section("In words", "As the command prints it.",
                f"<pre>{escape(render(plan))}\n\n{escape(explain(plan))}</pre>"),
    ]
    return html(f"plan of {plan.name}", body)


def _beside(parts: Sequence[str]) -> str:
    """Two columns where there is room."""
    return f'<div class="two">{"".join(parts)}</div>'


def _pipeline(plan: Plan) -> list[str]:
    case = plan.case
    if case.pp == 1:
        return []
    shown = case
    if case.pp > SHOWN_STAGES:  # the same layers a stage, fewer stages
        keep = SHOWN_STAGES
        split = (*case.chunks[: keep - 1], case.chunks[-1]) if case.vp == 1 else case.chunks[: keep * case.vp]
        shown = replace(case, pp=keep, split=split)
    count = min(case.micro_batches, max(SHOWN_MICRO_BATCHES, shown.pp + 4))
    count -= count % shown.pp if case.vp > 1 and count > shown.pp else 0
    words = f"{case.schedule}, {count} of {case.micro_batches} micro-batches"
    words += f", {shown.pp} of {case.pp} stages" if shown.pp < case.pp else ""
    found = intervals(shown, plan.machine, micro_batches=count)
    return [section("Pipeline", f"{words}; transfers left out. The bubble shrinks as micro-batches are added.",
                    pipeline_picture(found, shown))]


def write_text(path: Path, text: str) -> None:
    """Write the file under a temporary name, sync, rename. Raises EnvironmentFault."""
    part = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(stream.fileno(), file_mode())
            os.fsync(stream.fileno())
        os.replace(part, path)
    except OSError as error:
        if part and os.path.exists(part):
            os.unlink(part)
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror or error}") from None
