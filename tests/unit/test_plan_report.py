"""`plan --report`: one file, whole, with what the planner says; the replay behind the pipeline's picture; studies."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_port.cli.main import main
from megatron_port.core.config.loader import load
from megatron_port.ext.telemetry.numbers import ticks
from megatron_port.tools.charts.page import Series, line_chart
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_of
from megatron_port.tools.plan.compare import planned, studies
from megatron_port.tools.plan.page import choice_bars, machine_bars, passes, report_page
from megatron_port.tools.plan.search import options_of, search
from megatron_port.tools.plan.step import chunk_costs, plan_step, timeline
from megatron_port.tools.plan.text import make_plan


def base(run: str = "runs/frontier-175b") -> tuple[Case, Machine]:
    config = load(run).config
    return case_of(config)[0], machine_of(config)


@pytest.fixture(scope="module")
def page() -> str:
    config = load("runs/frontier-175b").config
    return report_page(config, make_plan(config, neighbours=False))


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_page_needs_nothing_else(page: str) -> None:
    assert not re.search(r"https?://|<script|<img|<link(?! rel=.icon. href=.data:,.>)|@import|url\((?!#)", page)
    assert "prefers-color-scheme:dark" in page and page.startswith("<!doctype html>") and page.endswith("</html>\n")
    assert set(re.findall(r"var\(--(\w+)\)", page)) <= set(re.findall(r"--(\w+):", page.partition("@media")[0]))


def test_nothing_is_wider_than_a_telephone(page: str) -> None:
    """At 390 px: what has a least width scrolls in its own box, and no words shrink below two thirds of theirs."""
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    style, body = page.partition("</style>")[::2]
    free = re.sub(r"\.scroll>svg\{[^}]*\}|min\(100%,\d+px\)|max-width:\d+px", "", style)
    assert not [px for px in re.findall(r"width:(\d+)px|minmax\((\d+)px", free) if int("".join(px)) > 350]
    assert re.search(r"\.scroll\{overflow-x:auto\}", style) and re.search(r"pre\{overflow-x:auto", style)
    assert not re.search(r"style=\"[^\"]*width", re.sub(r"<svg.*?</svg>", "", body, flags=re.DOTALL))
    alone = re.sub(r'<div class="scroll">.*?</div>', "", body, flags=re.DOTALL)
    assert "<table" not in alone and len(drawings(alone)) < len(drawings(body))
    assert all(350 / float(d.get("viewBox", "").split()[2]) > 0.66 for d in drawings(alone))


def test_every_picture_is_there_and_is_xml(page: str) -> None:
    found = [d.get("aria-label", "") for d in drawings(page)]
    for words in ("tp and pp", "memory", "seconds of a step", "passes of every", "weak", "strong", "the machine",
                  "the layout", "tensor parallelism", "micro-batches", "stages, batch fixed", "stages, 8"):
        assert any(words in label for label in found), words


def test_the_heat_map_hatches_what_does_not_fit(page: str) -> None:
    config = load("runs/frontier-175b").config
    case, machine = base()
    found = search(case, machine, options_of(config, case), keep_unfit=True)
    pairs = {(c.case.tp, c.case.pp) for c in found}
    fitting = {(c.case.tp, c.case.pp) for c in found if c.fits(machine)}
    heat = next(d for d in drawings(page) if "tp and pp" in d.get("aria-label", ""))
    cells = [r for r in heat.iter("rect") if r.get("class") in ("cell", "frame")]
    hatched = [r for r in cells if "url(#hatch)" in r.get("style", "")]
    assert len(cells) == len(pairs) and len(hatched) == len(pairs - fitting) > 0
    assert sum(r.get("class") == "frame" for r in cells) == 1


def test_memory_bars_end_where_the_plan_says(page: str) -> None:
    plan = make_plan(load("runs/frontier-175b").config, neighbours=False)
    bars = next(d for d in drawings(page) if "memory" in d.get("aria-label", ""))
    limit = next(float(x.get("y1", 0)) for x in bars.iter("line") if x.get("class") == "limit")
    tops: dict[str, float] = {}
    for r in bars.iter("rect"):
        title = r.find("title")
        if title is not None and title.text:
            stage = title.text.split(":")[0]
            tops[stage] = min(tops.get(stage, 1e9), float(r.get("y", 0)))
    assert len(tops) == 16 and all(top > limit for top in tops.values())
    foot = 300.0 - 34
    assert (foot - tops["stage 0"]) / (foot - limit) == pytest.approx(plan.memory[0].total / plan.limit, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "pp", "vp", "m"),
    [("1f1b", 4, 1, 9), ("gpipe", 3, 1, 5), ("1f1b", 4, 2, 8), ("zb-h1", 4, 1, 6), ("zb-v", 4, 2, 6)],
)
def test_the_picture_replays_what_the_planner_simulates(schedule: str, pp: int, vp: int, m: int) -> None:
    case, machine = base()
    case = replace(case, pp=pp, vp=vp, split=(), schedule=schedule)
    found = passes(case, machine, micro_batches=m)
    costs = chunk_costs(case, machine)
    line = timeline(
        case.schedule, pp, [c.forward + c.forward_tensor for c in costs],
        [c.backward + c.backward_tensor for c in costs], micro_batches=m,
    )
    assert max(i.end for row in found for i in row) == pytest.approx(line.span)
    assert sum(map(len, found)) == (3 if schedule.startswith("zb") else 2) * pp * vp * m
    for stage in range(pp):
        mine = sorted(found[stage], key=lambda i: i.start)
        assert all(a.end <= b.start + 1e-9 for a, b in zip(mine, mine[1:]))
        assert sum(i.end - i.start for i in mine) == pytest.approx(line.busy[stage])


@pytest.mark.parametrize("run", [
    "runs/frontier-22b", "runs/frontier-175b", pytest.param("runs/frontier-1t", marks=pytest.mark.slow),
])
def test_the_papers_observations_come_out(run: str) -> None:
    case, machine = base(run)
    found = {
        s.name: [p.tflops for p in planned(s, machine)]
        for s in studies(case, devices=4 * case.world, tensor=(1, 2, 4, 8))
    }
    assert found["tensor"] == sorted(found["tensor"], reverse=True)  # III.1
    assert found["micro-batches"] == sorted(found["micro-batches"])  # III.2
    assert found["stages"] == sorted(found["stages"], reverse=True)  # III.3
    # III.4: what is lost at a fixed ratio is little beside what is lost at a fixed batch
    loss = {name: 1 - found[name][-1] / found[name][0] for name in ("stages", "ratio")}
    assert loss["ratio"] < 0.14 and loss["ratio"] < 0.45 * loss["stages"]
    assert found["weak"][-1] / found["weak"][0] > 0.975
    assert found["strong"] == sorted(found["strong"], reverse=True)
    # Scores that are written out cost more the longer the sample is.
    gains = [fused / math for fused, math in zip(found["attention"], found["attention-math"], strict=True)]
    assert gains == sorted(gains) and gains[0] > 1


def test_studies_hold_what_they_say() -> None:
    case, _ = base()
    found = {s.name: [p.case for p in s.points] for s in studies(case, devices=512, tensor=(1, 2, 4, 8))}
    assert {c.world for c in found["tensor"]} == {512} and len({c.micro_batches for c in found["tensor"]}) == 1
    assert len({c.global_batch for c in found["stages"]}) == 1 and len({c.pp for c in found["stages"]}) > 2
    assert {c.micro_batches / c.pp for c in found["ratio"]} == {8}
    assert len({c.global_batch / c.dp for c in found["weak"]}) == 1
    assert len({c.global_batch for c in found["strong"]}) == 1
    for name, fused in (("attention", True), ("attention-math", False)):
        assert {c.flash for c in found[name]} == {fused} and len({c.model.seq_length for c in found[name]}) > 2
        assert len({c.global_batch * c.model.seq_length for c in found[name]}) == 1
    assert all(sum(c.chunks) == 96 for cases in found.values() for c in cases)


def test_sensitivity_has_the_right_signs() -> None:
    config = load("runs/frontier-175b").config
    case, machine = base()
    bars = {b.name: b for b in machine_bars(case, machine)}
    slow, fast = bars["matmul rate"].low, bars["matmul rate"].high
    assert slow is not None and fast is not None and 0.15 < slow <= 0.25 and fast < 0
    assert bars["jitter"].low is not None and bars["jitter"].low < 0
    assert [b.reach for b in machine_bars(case, machine)] == sorted((b.reach for b in bars.values()), reverse=True)
    found = search(case, machine, options_of(config, case), keep_unfit=True)
    layout = {b.name: b for b in choice_bars(case, machine, found)}
    wider = layout["tensor parallel size"]
    same = plan_step(replace(case, tp=8, dp=1, micro_batches=640), machine).seconds
    assert wider.high_label == "tp 8" and wider.high == pytest.approx(same / plan_step(case, machine).seconds - 1)


def test_ticks_are_round_and_cover() -> None:
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100] and ticks(0, 1e-3)[-1] == pytest.approx(1e-3)
    assert ticks(3, 3) == [3] and ticks(0.8, 1.0)[0] == pytest.approx(0.8)
    drawn = ElementTree.fromstring(line_chart([Series("a<b", [(1, 5.0)])], label="one point"))
    assert drawn.tag == "svg"


def test_the_command_writes_it_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "plan.html"
    assert main(["plan", "runs/frontier-22b", "--no-search", "--report", str(path)]) == 0
    assert f"report    {path}" in capsys.readouterr().out
    assert "<h1>" in path.read_text() and [p.name for p in path.parent.iterdir()] == ["plan.html"]
    (tmp_path / "file").write_text("")
    assert main(["plan", "runs/frontier-22b", "--no-search", "--report", str(tmp_path / "file" / "x.html")]) == 3
    assert "cannot be written" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_has_a_page_too(tmp_path: Path) -> None:
    config = load("runs/frontier-22b", ["layout.pipeline_parallel_size=1"]).config
    assert "does not fit" in report_page(config, make_plan(config, neighbours=False))
