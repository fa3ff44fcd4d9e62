"""Real DeepSpeed on the other side: its checkpoints come in, and its engine loads what goes out."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_batches, make_config, providers_of
from megatron_like import Source
from pool import RankPool

from megatron_port.core.checkpoint.format import plain
from megatron_port.core.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.errors import CheckpointError
from megatron_port.run.build import build_engine
from megatron_port.tools.interop.run_import import import_checkpoint
from megatron_port.tools.interop.universal import export_universal, megatron_names

STEPS, MORE = 2, 3
WAIT_S = 400.0
State = list[dict[tuple[str, str], torch.Tensor]]


def config_of(dtype: str, **model: object) -> RunConfig:
    """The vocabulary (53) needs padding at every layout; no clipping, so that DeepSpeed's norm does not matter."""
    base = {"num_layers": 4, "activation": "gelu_tanh", **model}
    return make_config(dtype=dtype, model=base, micro_batch_size=2, global_batch_size=8, clip_grad=0.0)


def train_and_save(config: RunConfig, topology: Topology, folder: Path) -> tuple[dict, list[float]]:
    """Train, save with DeepSpeed, note the state; then train on."""
    source = Source(config, topology)
    source.train(range(STEPS))
    source.save(folder, STEPS)
    state = source.state()
    return state, source.train(range(STEPS, STEPS + MORE))


def load_universal(config: RunConfig, topology: Topology, folder: Path) -> tuple[dict, list[float]]:
    """Load into a fresh engine with other weights; note the state; train on."""
    source = Source(config, topology, universal=True, scale=0.3)
    path, _ = source.engine.load_checkpoint(str(folder))
    assert path is not None
    state = source.state()
    assert source.engine.global_steps == STEPS
    return state, source.train(range(STEPS, STEPS + MORE))


def assembled(states: State, config: RunConfig, topology: Topology, kind: str) -> dict[str, torch.Tensor]:
    """Whole tensors in our names from what each rank's DeepSpeed says: concatenated, by hand."""
    out = {}
    for ours, foreign in megatron_names(config.model).items():
        stage = next(s for s in range(topology.pp) if (foreign.name, kind) in states[s * topology.tp * topology.dp])
        start = stage * topology.tp * topology.dp
        slices = [states[start + r][foreign.name, kind] for r in range(topology.tp)]
        if ours.endswith(("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "output.bias", "down.bias")) or (
            ours.startswith("final_norm") or ours == "embedding.position.weight"
        ):
            out[ours] = slices[0]
        elif ours.endswith(("output.weight", "down.weight")):
            out[ours] = torch.cat(slices, dim=1)
        elif ours.endswith(("up.weight", "up.bias")) and config.model.activation == "swiglu":
            out[ours] = torch.stack([torch.cat([s.chunk(2)[part] for s in slices]) for part in (0, 1)])
        else:
            out[ours] = torch.cat(slices)
        if ours in ("embedding.word.weight", "head.weight"):
            out[ours] = out[ours][: config.model.vocab_size]
    return out


def check_state(checkpoint: Checkpoint, states: State, config: RunConfig, topology: Topology) -> None:
    """Weights and moments of a checkpoint of ours are DeepSpeed's, to the bit."""
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        theirs = assembled(states, config, topology, kind)
        assert set(checkpoint.names(kind)) == set(theirs)
        for name, tensor in theirs.items():
            mine = checkpoint.read(name, kind, (0,) * tensor.dim(), tuple(tensor.shape))
            assert mine.dtype == torch.float32 and torch.equal(mine, tensor), (name, kind)
            assert float(tensor.abs().max()) > 0.0 or name.endswith("bias"), (name, kind)


def our_losses(config: RunConfig, checkpoint: Checkpoint) -> list[float]:
    """Go on with the native engine, in this process."""
    ctx = ParallelContext.create(Topology(), "cpu")
    engine = build_engine(config, ctx, providers_of(config), initialise=False)
    engine.load_state(checkpoint.read, checkpoint.scalars)
    batches = make_batches(config, ctx)
    lr = config.optimizer.lr
    return [engine.train_step(batches(s), step=s, lr=lr).loss for s in range(STEPS, STEPS + MORE)]


UNTIED_GQA_SWIGLU = {"activation": "swiglu", "tie_embeddings": False, "num_query_groups": 2}
CASES = [
    ("fp32", Topology(tp=2, pp=2), Topology(tp=4), {}),
    ("bf16", Topology(tp=2, dp=2), Topology(pp=2, dp=2), UNTIED_GQA_SWIGLU),
    ("bf16", Topology(pp=2, dp=2), Topology(tp=2, pp=2), {}),
]


@pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(c, marks=pytest.mark.slow) for c in CASES[1:])],
    ids=lambda c: f"{c[0]} {c[1]} to {c[2]}")
def test_megatron_deepspeed_comes_in_and_universal_goes_out(ranks: RankPool, tmp_path: Path, case: tuple) -> None:
    """DeepSpeed saves a pipeline; it is imported, trained on, exported, and loaded by DeepSpeed in another layout."""
    dtype, topology, other, model = case
    config = config_of(dtype, **model)
    ds: dict[str, Any] = {"deepspeed": True, "timeout": WAIT_S}
    results = ranks.run(topology.world_size, train_and_save, config, topology, tmp_path / "mds", **ds)
    states, losses = [r[0] for r in results], results[0][1]

    with pytest.raises(CheckpointError, match="--trust-pickle"):
        import_checkpoint(tmp_path / "mds", tmp_path / "no")
    assert not list(tmp_path.glob(".no*")) and not (tmp_path / "no").exists()

    notes: list[str] = []
    path = import_checkpoint(
        tmp_path / "mds", tmp_path / "ours", trusted=True, vocab_size=config.model.vocab_size, note=notes.append
    )
    checkpoint = open_checkpoint(path)
    assert not notes and "megatron_like" in sys.modules
    assert (checkpoint.step, checkpoint.manifest.state.samples) == (STEPS, STEPS * 8)
    assert checkpoint.scalars == {"optimizer_steps": STEPS}
    saved = checkpoint.manifest.state.config["model"]
    asked = dataclasses.replace(config.model, ffn_hidden_size=config.model.ffn_size, name="imported")
    assert saved == plain(asked)
    check_state(checkpoint, states, config, topology)
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    assert our_losses(config, checkpoint) == pytest.approx(losses, rel=tolerance)

    export_universal(checkpoint, tmp_path / "universal")
    back = ranks.run(other.world_size, load_universal, config, other, tmp_path / "universal", **ds)
    check_state(checkpoint, [r[0] for r in back], config, other)
    assert back[0][1] == pytest.approx(losses, rel=tolerance)


def test_weights_of_layer_files_only(ranks: RankPool, tmp_path: Path) -> None:
    """Without the optimizer the bf16 weights of the layer files come in, as step 0."""
    config, topology = config_of("bf16"), Topology(tp=2, pp=2)
    results = ranks.run(4, train_and_save, config, topology, tmp_path / "mds", deepspeed=True, timeout=WAIT_S)
    path = import_checkpoint(tmp_path / "mds", tmp_path / "ours", trusted=True, vocab_size=53, weights_only=True)
    checkpoint = open_checkpoint(path)
    assert checkpoint.step == 0 and checkpoint.kinds() == ("weight",)
    for name, tensor in assembled([r[0] for r in results], config, topology, "weight").items():
        mine = checkpoint.read(name, "weight", (0,) * tensor.dim(), tuple(tensor.shape))
        assert mine.dtype == torch.bfloat16 and torch.equal(mine, tensor.bfloat16()), name
