"""The paper's studies on real ranks, each point a few steps of training, drawn beside what the planner says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_port.core.config.checks import problems
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.loader import Loaded
from megatron_port.core.config.schema import DataConfig, RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.io.files import write_output
from megatron_port.ext.telemetry.flops import hardware_flops
from megatron_port.tools.charts.page import columns, page, section
from megatron_port.tools.plan.case import Case, case_of
from megatron_port.tools.plan.compare import Planned, Point, Study, planned, studies
from megatron_port.tools.plan.page import study_picture
from megatron_port.tools.plan.search import Candidate, fullest, options_of, settings_of
from megatron_port.tools.plan.step import plan_step
from megatron_port.tools.tune.strategies import Results, Space, Trial, key_of, make_space
from megatron_port.tools.tune.tuner import Launcher, hold_folder, run_trial

NAMES = ("tensor", "micro-batches", "stages", "ratio", "weak", "strong", "attention", "attention-math")


def sweep(
    loaded: Loaded, overrides: Sequence[str], *, launcher: Launcher, devices: int | None, names: Sequence[str],
    steps: int, warm_up: int, timeout_s: float, folder: Path, fresh: bool, say: Callable[[str], None],
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Measure every point of the studies that is not in ``folder`` yet; return the page.

    ``devices``: the most that a point may use (None: the run's). ``advance``: told the points done, and how many.

    Raises:
        ConfigError: the run cannot be planned, or no study has two points.
        EnvironmentFault: the launcher is not there, or the folder cannot be written.
    """
    space = make_space(loaded.config, world_size=devices)
    config = space.config
    found = _studies(space, names, space.world)
    if not found:
        raise ConfigError(
            f"no study has two points on {space.world} device{'s' if space.world > 1 else ''}; give more, or a model "
            "with more layers and heads"
        )
    results = Results.open(folder, with_values(config, {"batch.global_batch_size": 1}), steps, fresh=fresh)
    if results.left_out:
        say(f"note: {folder}: {results.left_out}")
    run_file = loaded.files[-1]
    measured: dict[str, list[tuple[float, float, float]]] = {}
    lines: dict[str, list[Planned]] = {}
    done, total = 0, sum(len(study.points) for study in found)
    advance(done, total)
    with hold_folder(folder, say) as note:
        for study in found:
            lines[study.name] = planned(study, space.machine)
            say(f"{study.title} ({study.says})")
            rates: list[tuple[float, float]] = []
            for point, plan in zip(study.points, lines[study.name]):
                trial = _trial(point, config, space, results, lambda c, s: run_trial(
                    run_file, overrides, config, c, s, launcher=launcher, steps=steps, warm_up=warm_up,
                    timeout_s=timeout_s, folder=folder / "trials", note=note,
                ))
                done += 1
                advance(done, total)
                if trial.seconds is None:
                    say(f"  {study.x_label} {point.x:g}: {trial.status}: {trial.error[:160]}")
                    continue
                rate = _rate(point.case, trial.seconds)
                rates.append((point.x, rate))
                say(
                    f"  {study.x_label} {point.x:g}: {trial.seconds:.4g} s per step, {rate:.4g} TFLOP/s per device; "
                    f"planned {plan.seconds:.4g} s ({plan.seconds / trial.seconds - 1:+.0%}); {point.case.label()}"
                )
            measured[study.name] = [(x, r, r / rates[0][1]) for x, r in rates]
    path = folder / "sweep.html"
    write_output(path, _page(config, space.world, found, lines, measured))
    say(f"page: {path}")
    return path


def _studies(space: Space, names: Sequence[str], devices: int) -> list[Study]:
    """Return those asked for, with the points that training takes."""
    first = space.fitting[0].case if space.fitting else space.candidates[0].case
    config = space.config
    try:
        base, _ = case_of(config, devices)  # the run as it is, where these devices allow it
    except ConfigError:
        base = first
    if problems(replace(config, data=DataConfig(synthetic=True)), world_size=devices):
        base = first
    tensor = options_of(config, base).tensor
    out = []
    for study in studies(base, devices=devices, tensor=tensor):
        points = tuple(p for p in study.points if _legal(config, p))
        if study.name in names and len(points) > 1:
            out.append(replace(study, points=points))
    return out


def _settings(config: RunConfig, point: Point) -> dict[str, Any]:
    case = point.case
    nodes = -(-case.world // config.cluster.gpus_per_node) if config.cluster.nodes else 0
    return {**settings_of(config, case), "batch.global_batch_size": case.global_batch, "cluster.nodes": nodes} | dict(
        point.settings
    )


def _legal(config: RunConfig, point: Point) -> bool:
    changed = with_values(config, {**_settings(config, point), "data": DataConfig(synthetic=True)})
    return not problems(changed, world_size=point.case.world)


def _rate(case: Case, seconds: float) -> float:
    """Hardware TFLOP/s of one device."""
    recompute = "none" if case.recompute == "selective" and case.flash else case.recompute
    executed = hardware_flops(case.model, recompute, case.tp, case.dropped, chunked_head=case.head_chunk > 0)
    return executed * case.global_batch / seconds / case.world / 1e12


def _trial(
    point: Point, config: RunConfig, space: Space, results: Results,
    measure: Callable[[Candidate, dict[str, Any]], Trial],
) -> Trial:
    """A point's trial: from the results, or measured and kept."""
    case, settings = point.case, _settings(config, point)
    key = key_of(settings, case.world)
    if key not in results.trials:
        candidate = Candidate(case=case, step=plan_step(case, space.machine), memory=fullest(case, space.machine))
        results.add(measure(candidate, settings))
    return results.trials[key]


def _page(
    config: RunConfig, devices: int, found: Sequence[Study], lines: dict[str, list[Planned]],
    measured: dict[str, list[tuple[float, float, float]]],
) -> str:
    pictures = [study_picture(s, lines[s.name], measured[s.name]) for s in found]
    head = f"<h1>{config.name}: the paper's studies, measured</h1>"
    words = (
        f"Up to {devices} devices of {config.cluster.name}; model {config.model.name}, {config.precision.dtype}, "
        f"engine {config.engine}. Dashed: planned. Hardware TFLOP/s count recompute. Efficiencies are of the smallest."
    )
    return page(f"sweep of {config.name}", head + section("", words, columns(pictures)))
