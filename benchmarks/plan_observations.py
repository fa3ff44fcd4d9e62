"""The paper's observations III.1 to III.4 (arXiv 2312.12705) for its three models on Frontier, by the planner.

`python benchmarks/plan_observations.py` writes docs/images/observations.svg: one file, light and dark.
"""

from __future__ import annotations

from pathlib import Path

from megatron_port.core.config.loader import load
from megatron_port.core.io.files import write_text
from megatron_port.tools.charts.page import Axis, Series, drawing, line_chart, standalone, text
from megatron_port.tools.plan.case import case_of, machine_of
from megatron_port.tools.plan.compare import Study, planned, studies

RESULT = Path(__file__).resolve().parents[1] / "docs" / "images" / "observations.svg"
RUNS = {"22B": "runs/frontier-22b", "175B": "runs/frontier-175b", "1T": "runs/frontier-1t"}
NAMES = ("tensor", "micro-batches", "stages", "ratio")
WIDTH, HEIGHT = 480, 320


def panels() -> list[str]:
    """A chart for each observation, a line for each model."""
    found: dict[str, list[Series]] = {name: [] for name in NAMES}
    shown: dict[str, Study] = {}
    for model, run in RUNS.items():
        config = load(run).config
        case, machine = case_of(config)[0], machine_of(config)
        for study in studies(case, devices=4 * case.world, tensor=(1, 2, 4, 8)):
            if study.name in found:
                points = planned(study, machine)
                shown[study.name] = study
                found[study.name].append(Series(
                    model, [(p.x, p.tflops) for p in points], len(found[study.name]), dots=True,
                    hollow=[not p.fits for p in points],
                ))
    return [
        line_chart(
            found[name], label=shown[name].says, title=shown[name].says, x=Axis(shown[name].x_label, log=2),
            y=Axis("hardware TFLOP/s a GCD", least=0.0), width=WIDTH - 20, height=HEIGHT - 100,
        ).replace("<svg ", f'<svg x="0" y="0" width="{WIDTH - 20}" height="{HEIGHT - 10}" ', 1)
        for name in NAMES
    ]


def main() -> None:
    """Draw, and write the picture."""
    cells = [
        f'<g transform="translate({i % 2 * WIDTH},{i // 2 * HEIGHT})">{panel}</g>' for i, panel in enumerate(panels())
    ]
    words = "Planned for Frontier: III.1 to III.4 of arXiv 2312.12705. Hollow points do not fit a GCD's 64 GB."
    body = "".join(cells) + text(10, 2 * HEIGHT + 14, words, kind="small")
    picture = drawing(2 * WIDTH, 2 * HEIGHT + 26, [body], "The paper's observations, planned")
    write_text(RESULT, standalone(picture, themed=True))
    print(RESULT)


if __name__ == "__main__":
    main()
