"""Names of layouts: any axes in any order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_port.core.config.schema import LayoutConfig
from megatron_port.core.errors import ConfigError
from megatron_port.tools.parity.layout_name import AXES, parse_layout

BASE = LayoutConfig()


@given(st.permutations(sorted(AXES)), st.lists(st.integers(2, 99), min_size=6, max_size=6), st.booleans())
def test_any_axes_in_any_order(order: list[str], sizes: list[int], sequence: bool) -> None:
    wanted = dict(zip(order, sizes))
    text = "".join(f"{part}{size}" for part, size in wanted.items()) + ("sp" if sequence else "")
    layout = parse_layout(text, BASE)
    assert {part: getattr(layout, name) for part, name in AXES.items()} == wanted
    assert layout.sequence_parallel == sequence


def test_what_is_left_out_is_one() -> None:
    layout = parse_layout("pp2dp2cp2tp2ep4", BASE)
    assert (layout.pipeline_parallel_size, layout.context_parallel_size, layout.expert_parallel_size) == (2, 2, 4)
    assert layout.shard_size == 0


@pytest.mark.parametrize("text", ["", "tp", "tp2tp2", "tp2xx3", "2tp", "tp2 pp2", "spsp", "tp-1"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write sizes behind tp, pp, dp, cp, ep, shard"):
        parse_layout(text, BASE)
