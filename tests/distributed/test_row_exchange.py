"""DeepEP and MORI as providers of experts' exchanges, with stand-ins for the packages: bits, calls and their order."""

from __future__ import annotations

import dataclasses

import fake_exchanges
import pytest
import torch
from cases import make_batches, make_config, providers_of
from pool import RankPool

from megatron_port.core.config.schema import MoEConfig, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.engine.native import NativeEngine
from megatron_port.ext.experts.exchanges import DeepEP, Mori
from megatron_port.run.build import build_engine

MAKERS = {
    "torch": lambda: None, "deepep": lambda: DeepEP(fake_exchanges.deep_ep),
    "mori": lambda: Mori(fake_exchanges.mori_ops, fake_exchanges.mori_shmem),
}


def exchanged_step(
    config: RunConfig, topology: Topology, name: str
) -> tuple[dict[str, torch.Tensor], float, list[str]]:
    """Gradients and loss of a step, and the calls of the package."""
    ctx = ParallelContext.create(topology, "cpu")
    fake_exchanges.CALLS.clear()
    try:
        engine = build_engine(
            config, ctx, dataclasses.replace(providers_of(config), row_exchange=MAKERS[name]())
        )
        assert isinstance(engine, NativeEngine)
        seen: dict[str, torch.Tensor] = {}
        engine.on_gradients = lambda found: seen.update({r.name: g.clone() for r, g in found})
        result = engine.train_step(make_batches(config, ctx)(0), step=0, lr=1e-2)
        return seen, result.loss, list(fake_exchanges.CALLS)
    finally:
        ctx.close()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_libraries_give_the_bits_of_torch(ranks: RankPool, recompute: str) -> None:
    """With a shared block and dropped tokens. Each layer asks for a way once in a forward pass; its three other
    exchanges follow that one, the way there and back in both directions."""
    topology = Topology(dp=2, ep=2)
    config = make_config(
        dtype="bf16", model={"num_layers": 2, "hidden_size": 16, "moe": MoEConfig(
            num_experts=4, ffn_hidden_size=8, shared_ffn_hidden_size=8, capacity_factor=1.0)},
        layout={"expert_parallel_size": 2, "zero_stage": 1, "recompute": recompute}, global_batch_size=4,
    )
    expected = ranks.run(2, exchanged_step, config, topology, "torch")
    forward = ["dispatch", "combine"] * 2
    backward = ["dispatch again", "combine"] * 2 if recompute == "none" else [
        "dispatch", "combine", "dispatch again", "combine"] * 2
    for name in ("deepep", "mori"):
        for (plain, loss, _), (found, same, calls) in zip(
            expected, ranks.run(2, exchanged_step, config, topology, name), strict=True
        ):
            assert loss == same and plain.keys() == found.keys()
            assert all(torch.equal(g, found[key]) for key, g in plain.items())
            made = ["shmem True", "buffer"] if name == "mori" else ["buffer"]
            steps = [call for call in calls if call not in made]
            assert calls[: len(made)] == made and len(calls) == len(made) + len(steps)
            assert steps == (forward + backward) * (len(steps) // len(forward + backward)) and steps
