"""Published rows that are set aside stay apart: the list is the draw, and scripts get the others."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    split = importlib.import_module("published_split")


def test_the_list_is_the_draw_and_a_tenth() -> None:
    drawn = {(line.file, line.number): line.digest for line in split.draw()}
    assert drawn == split.listed()
    share = len(drawn) / len(split.lines())
    assert 0.1 <= share < 0.16  # whole configurations, at least a tenth of each family


def test_no_configuration_is_on_both_sides() -> None:
    aside = split.listed()
    for group in split.configurations(split.lines()):
        assert len({(line.file, line.number) in aside for line in group}) == 1


def test_scripts_get_the_used_rows_and_not_the_others() -> None:
    for file in split.FILES:
        used = {line.number for line in split.used(file)}
        aside = {number for name, number in split.listed() if name == file}
        assert not used & aside and len(used | aside) == len(split.lines([file]))
    with pytest.raises(SystemExit, match="no entry"):
        split.opened("points2.csv", "a look in between")


def test_a_changed_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    (file, number), *_ = split.listed()
    changed = {**split.listed(), (file, number): "0" * 16}
    monkeypatch.setattr(split, "listed", lambda: changed)
    with pytest.raises(SystemExit, match="has changed"):
        split.used(file)
