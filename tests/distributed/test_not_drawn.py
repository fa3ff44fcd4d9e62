"""What the fuzz leaves as it is: nothing that a step runs reads it, or something else draws or tests it."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
from cases import make_config, single_run
from not_drawn import CONSTANT_THERE, ELSEWHERE, OTHER_TESTS, UNREAD, reads

from megatron_port.core.config.dump import leaves

SEEDS = {"compressed": 12, "distilled": 6, "experts": 100, "factored": 20, "mixers": 20}
"""Of each module as many as it takes until all options have changed."""
FURTHER = {"mixers": range(1000, 1012)}
"""Attention beside Mamba-2."""


def test_no_step_reads_what_is_not_drawn() -> None:
    names = UNREAD.keys() - {"name"}  # rules and providers have a ``config.name`` too
    assert not [found for name in sorted(names) for found in reads(name)]


def test_reads_are_found() -> None:
    """The search itself: of options that a step does read."""
    for name in ("seed", "optimizer.beta1", "layout.zero_stage", "backend.graphs", "numerics"):
        assert list(reads(name)), name


def test_labels_change_no_number() -> None:
    config = make_config(dtype="fp64")
    renamed = dataclasses.replace(
        config, name="other", output_dir="elsewhere",
        model=dataclasses.replace(config.model, name="other", family="llama"),
    )
    one, other = (single_run(c, steps=1) for c in (config, renamed))
    assert one.losses == other.losses and one.grad_norms == other.grad_norms


@pytest.mark.parametrize("module", sorted(ELSEWHERE))
def test_other_modules_draw_what_they_are_said_to(module: str) -> None:
    values: dict[str, set[object]] = {}
    drawing = importlib.import_module(module)
    draws = [drawing.draw, *([drawing.few_draw] if module == "compressed" else [])]
    for one in (draw(seed) for draw in draws for seed in (*range(SEEDS[module]), *FURTHER.get(module, ()))):
        for name, value in leaves(one.config):
            if any(name == key or name.startswith(f"{key}.") for key in ELSEWHERE[module]):
                values.setdefault(name, set()).add(value)
    fixed = {name for name, found in values.items() if len(found) == 1}
    assert fixed == {name for name in CONSTANT_THERE if name in values}


def test_the_named_tests_set_what_they_are_named_for() -> None:
    for name, (_, file) in OTHER_TESTS.items():
        assert name.rpartition(".")[2] in (Path(__file__).parents[1] / file).read_text(), name
