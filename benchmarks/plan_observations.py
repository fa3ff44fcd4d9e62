"""The paper's observations III.1 to III.4 (arXiv 2312.12705) for its three models on Frontier, by the planner.

`python benchmarks/plan_observations.py` writes docs/images/observations.svg: one file, light and dark.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_port.config.loader import load
from megatron_port.plan.case import case_of, machine_of
from megatron_port.plan.page import STYLE
from megatron_port.plan.studies import Study, planned, studies
from megatron_port.plan.svg import Series, chart, text

RESULT = Path(__file__).resolve().parents[1] / "docs" / "images" / "observations.svg"
RUNS = {"22B": "runs/frontier-22b", "175B": "runs/frontier-175b", "1T": "runs/frontier-1t"}
NAMES = ("tensor", "micro-batches", "stages", "ratio")
WIDTH, HEIGHT, HEAD = 480, 300, 34


def style() -> str:
    """The report's colours and letters, for a picture that stands alone."""
    wanted = r":root\{.*?\}|@media[^{]*\{:root\{.*?\}\}|(?:svg text|line|path)[^{}]*\{.*?\}"
    kept = re.findall(wanted, STYLE, re.DOTALL)
    return "".join(part.replace("\n", "") for part in kept)


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
                found[study.name].append(
                    Series(model, [(p.x, p.tflops) for p in points], hollow=[not p.fits for p in points])
                )
    return [
        text(10, 18, shown[name].says, kind="strong") + chart(
            found[name], x_label=shown[name].x_label, y_label="hardware TFLOP/s per GCD", label=shown[name].says,
            log_x=True,
        ).replace("<svg ", f'<svg x="0" y="{HEAD - 8}" width="{WIDTH - 20}" height="{HEIGHT - HEAD}" ', 1)
        for name in NAMES
    ]


def main() -> None:
    """Draw, and write the picture."""
    cells = [
        f'<g transform="translate({i % 2 * WIDTH},{i // 2 * HEIGHT})">{panel}</g>' for i, panel in enumerate(panels())
    ]
    words = "Planned for Frontier: III.1 to III.4 of arXiv 2312.12705. Hollow points do not fit a GCD's 64 GB."
    body = "".join(cells) + text(10, 2 * HEIGHT + 14, words, kind="small")
    RESULT.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {2 * HEIGHT + 26}" role="img">'
        f'<style>{style()}</style><rect width="100%" height="100%" style="fill:var(--paper)"/>{body}</svg>\n'
    )
    print(RESULT)


if __name__ == "__main__":
    main()
