"""Claims of the sources judge themselves: each is computed, and benchmarks/evidence/coverage.md has what came out."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_each_claim_is_what_it_is_said_to_be() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        script = importlib.import_module("claims")
    found = script.claims()
    assert len(found) >= 58 and not [c.item for c in found if c.found != c.holds]
    assert all(c.why for c in found if not c.found)
    one = next(c for c in found if c.least)  # "more than": no upper bound
    assert replace(one, value=one.number + 40).found and not replace(one, value=one.number - 0.1).found
    parts = script.ratio_parts("22b", 4, 16)
    assert [round(parts[name], 1) for name in ("compute", "bubble", "jitter", "pipeline")] == [9.2, 1.8, 1.1, 0.7]
    assert script.page(found) == script.PAGE.read_text(), "run: python benchmarks/claims.py --write"
