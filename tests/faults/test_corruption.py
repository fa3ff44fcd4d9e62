"""Seeded damage to the newest checkpoint: found before a weight is used, named, passed over for the one before it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from corruption import KINDS, CheckpointCase, campaign

from megatron_port.core.errors import DamagedCheckpoint
from megatron_port.run import loading, state


def check(folder: Path, count: int) -> None:
    rows = campaign(folder, range(count))
    assert [row for row in rows if not row["found"]] == []
    assert len(rows) == count and len(Counter(row["kind"] for row in rows)) == len(KINDS)


def test_25_corruptions_are_found(tmp_path: Path) -> None:
    """Of every kind; the soak finds hundreds."""
    check(tmp_path, 25)


@pytest.mark.slow
def test_300_corruptions_are_found(tmp_path: Path) -> None:
    check(tmp_path, 300)


def test_without_damage_the_newest_is_taken(tmp_path: Path) -> None:
    """What the campaign calls found is not found when nothing is damaged."""
    place = CheckpointCase(tmp_path)
    loaded = loading.load_first_whole(place.engine, state.find_checkpoints(place.session), place.session)
    assert loaded.path == place.bad and place.lines == []


def test_nothing_to_fall_back_on(tmp_path: Path) -> None:
    """Every checkpoint is damaged: the run says so and ends; it never starts over by itself."""
    place = CheckpointCase(tmp_path)
    for path in (place.good, place.bad):
        shard = path / "rank-00002.safetensors"
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"1 newer ones were passed over.*rank-00002.*resume = \"never\""):
        loading.load_first_whole(place.engine, state.find_checkpoints(place.session), place.session)
    assert sum("falling back" in line for line in place.lines) == 1
    for path in (place.good, place.bad):
        (path / "rank-00002.safetensors").unlink()
    with pytest.raises(state.CheckpointError, match="none of the 2 checkpoints"):  # type: ignore[attr-defined]
        state.find_checkpoints(place.session)
