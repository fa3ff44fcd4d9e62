"""Forged manifests with right hashes: one line each, and the run resumes from the step before."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from corruption import GOOD, CheckpointCase
from forgeries import CASES, Change, forge, put

from megatron_port.cli.main import main
from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.errors import CheckpointError
from megatron_port.run import loading, state

SECONDS = 20
"""For what takes a tenth of one: waiting for a pipe, a terabyte or a quadratic sweep takes longer."""


@contextmanager
def in_time() -> Iterator[None]:
    """Raise in the middle of whatever takes longer."""

    def late(number: int, frame: Any) -> None:
        raise AssertionError(f"still at it after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> CheckpointCase:
    return CheckpointCase(tmp_path_factory.mktemp("forged"))


def resume(place: CheckpointCase) -> Any:
    """The start of a run that finds both checkpoints."""
    place.lines.clear()
    place._randomise(1)
    loaded = loading.load_first_whole(place.engine, state.find_checkpoints(place.session), place.session)
    loaded.close()
    return loaded


@pytest.mark.parametrize("change", CASES.values(), ids=CASES.keys())
def test_the_step_before_is_taken(place: CheckpointCase, change: Change, capsys: pytest.CaptureFixture[str]) -> None:
    place.restore()
    forge(place.bad, change)
    with in_time():
        assert resume(place).path == place.good
    held = place.held()
    assert all(torch.equal(held[k], t) for k, t in place.truth[GOOD].items())
    said = "\n".join(place.lines)
    assert place.bad.name in said and ("falling back" in said or "passing over" in said)
    assert len(said) < 5000 and all(line.isprintable() for line in place.lines)
    # No command has a traceback for it either.
    with in_time():
        assert main(["checkpoint", "ls", str(place.home)]) == 0
        assert f"{place.good.name} " in capsys.readouterr().out
        with pytest.raises(CheckpointError):  # by the manifest alone, or by what lies in the files, or by the model
            opened = open_checkpoint(place.bad)
            opened.verify()
            loading.check_same_model(opened.manifest, place.config, place.bad)
            loading.check_resumable(opened, place.config)


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 100


@pytest.mark.parametrize(("path", "value"), [
    ("lineage.run", "4f2a"), ("lineage.commit", 7), ("lineage.epoch", 2), ("unheard", {"of": [1, None]}),
    ("scalars.loss_scale_hysteresis_left", -1),  # after an overflow more than it allows
    ("extra.later", [1.5, "x"]), ("config.later", {"a": {"b": True}}),
])
def test_fields_that_may_be_there(place: CheckpointCase, path: str, value: Any) -> None:
    """What this version does not know, and what another optional field says, costs nothing."""
    place.restore()
    forge(place.bad, put(path, value))
    assert resume(place).path == place.bad and place.lines == []


def test_a_newer_one_of_step_0_without_moments_is_an_import(place: CheckpointCase) -> None:
    """Weights alone are a legal start, where nothing was trained."""
    place.restore()

    def change(body: dict[str, Any], checkpoint: Path) -> None:
        body.update(step=0, samples=0, tokens=0, pieces=[p for p in body["pieces"] if p["kind"] == "weight"])
        for p in body["pieces"]:
            assert p["file"] in body["files"]

    forge(place.bad, change)
    os.rename(place.bad, place.home / "step-00000000")
    assert resume(place).path.name == "step-00000000"
