"""Every registered model family on {1, 2}³ layouts: in fp64 each trains as one process does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import hf_models as hf
import pytest
from cases import make_config
from drawing import Draw
from fuzz import failures, run_draws
from pool import RankPool

from megatron_port.core.dist.mesh import Topology
from megatron_port.ext.families import family_named, family_names
from megatron_port.tools.interop.hf_config import model_from_hf

pytest.importorskip("transformers")


OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"sliding_window": 5, "attention_pattern": ("window", "full"), "attention_sinks": True},
    "gpt2": {"sliding_window": 7, "attention_softcap": 0.5},
}
"""Options that no family here has yet, on the layouts of one."""


def draws(family: str, world: int) -> list[Draw]:
    """Each layout of ``world`` ranks with sequence parallelism and without, one more with a key/value head shared; the
    first and every other one with its experts, if it has any, divided over two ranks."""
    model = model_from_hf(hf.small(family, length=16).to_dict(), family)
    values = {**vars(model), "num_layers": 2, **OPTIONS.get(family, {})}
    out = []
    for (tp, pp, dp), sequence in itertools.product(itertools.product((1, 2), repeat=3), (False, True)):
        if tp * pp * dp != world or (sequence and tp == 1):
            continue
        groups = 1 if sequence and model.kv_heads != model.num_attention_heads else model.kv_heads
        ep = 2 if model.moe.enabled and tp * dp > 1 and len(out) % 2 == 0 else 1
        config = make_config(
            dtype="fp64", model={**values, "num_query_groups": groups},
            layout={"sequence_parallel": sequence, "expert_parallel_size": ep},
        )
        out.append(Draw(len(out), config, Topology(tp, pp, dp, ep=ep)))
    return out


EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2")
"""Families with experts whose options GPT-OSS and DeepSeek-V3 have, or other tests: only with SLOW=1."""
PECULIAR = ("deepseek_v3", "gemma3_text", "qwen3_next")
"""Families that run on four ranks too without SLOW=1: the others differ from these by options that the fuzzer draws."""


def worlds() -> Iterator[Any]:
    """Families and the ranks that each runs on."""
    for family, world in itertools.product(family_names(), (2, 4, 8)):
        quick = (world == 2 and family not in EXPERTS) or (world == 4 and family in PECULIAR)
        if not family_named(family).twin:
            yield pytest.param(family, world, id=f"{family}-{world}", marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("family", "world"), worlds())
def test_a_family_on_every_layout(ranks: RankPool, family: str, world: int) -> None:
    results = run_draws(ranks, draws(family, world))
    assert results and not failures(results), failures(results)
