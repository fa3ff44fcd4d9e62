"""Captured steps on several ranks: collectives of replicas and of tensor parallelism are part of what is replayed."""

from __future__ import annotations

from dataclasses import replace

from cases import make_batches
from offload_matrix import State, Steps, advance, case, engine_of, state_of
from pool import RankPool
from step_tape import TapeCapturer

from megatron_port.core.config.features import ActivationsConfig, FineTuningConfig
from megatron_port.core.config.schema import PrecisionConfig, RunConfig
from megatron_port.core.dist.mesh import Topology

CASES = {
    "zero 1": (replace(
        # Overflows at first, and not in the step that is captured.
        case("fp16", 1, micro_batches=4), precision=PrecisionConfig(
            dtype="fp16", initial_loss_scale=2.0**18, loss_scale_hysteresis=1, loss_scale_window=3)
    ), Topology(1, 1, 2)),
    "zero 2, shared table apart": (case("bf16", 2, tied=False), Topology(1, 1, 2)),
    "tensor and sequence": (
        case("fp32", 0, dp=1, micro_batches=4, tensor_parallel_size=2, sequence_parallel=True), Topology(2, 1, 1)
    ),
    "head in chunks": (
        replace(case("bf16", 0, dp=1, tensor_parallel_size=2), activations=ActivationsConfig(head_chunk=5)),
        Topology(2, 1, 1),
    ),
    "adapters with dropout on parts of sequences": (
        replace(
            case("bf16", 1, dp=1, context_parallel_size=2),
            fine_tuning=FineTuningConfig(method="lora", rank=4, dropout=0.2),
        ), Topology(cp=2)
    ),
}


def both(cases: list[tuple[RunConfig, Topology]]) -> list[tuple[tuple[Steps, State], tuple[Steps, State]]]:
    """Each run without and with graphs."""
    out = []
    for config, topology in cases:
        found = []
        for captured in (False, True):
            with engine_of(config, topology) as engine:
                if captured:
                    engine.capture_steps(TapeCapturer())
                steps = advance(engine, range(6))
                assert engine.captured is None or engine.captured.graphs.replays
                steps.append((engine.eval_step(make_batches(config, engine.ctx)(9)).loss,))  # of gathered weights
                assert engine.state_damage(now=True) is None
                found.append((steps, state_of(engine)))
        out.append((found[0], found[1]))
    return out


def test_replayed_steps_are_the_steps_on_every_rank(ranks: RankPool) -> None:
    for rank, results in enumerate(ranks.run(2, both, list(CASES.values()), timeout=240.0)):
        for name, (plain, captured) in zip(CASES, results, strict=True):
            assert captured == plain, (rank, name)
