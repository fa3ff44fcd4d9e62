"""Groups of parameters, muP, adaptive clipping and averaged weights, on one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.checkpoint.writer import save_checkpoint
from megatron_port.core.config.checks import problems
from megatron_port.core.config.dump import to_toml
from megatron_port.core.config.loader import load
from megatron_port.core.config.optimizer import parameter_class
from megatron_port.core.config.schema import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParameterGroup,
    PrecisionConfig,
    RunConfig,
    TrainingConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.errors import CheckpointError, ConfigError
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.model.shapes import parameter_shapes
from megatron_port.core.optim.gradients import NormStatistics
from megatron_port.core.registry import OPTIMIZERS
from megatron_port.ext.kernels.kernels import kernels_status
from megatron_port.ext.kernels.kernels import load as load_kernels
from megatron_port.ext.rules.adaptive_clipping import AdaptiveClipping
from megatron_port.ext.weights.readers import AveragedCheckpoint
from megatron_port.run.build import build_engine, state_records
from megatron_port.run.config_hash import config_hash
from megatron_port.run.state import Position, state_of

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, seq_length=16, init_std=0.1)


def config_of(**optimizer: Any) -> RunConfig:
    return RunConfig(
        engine="native", seed=3, model=MODEL, batch=BatchConfig(global_batch_size=4),
        precision=PrecisionConfig(dtype="fp64"), optimizer=OptimizerConfig(**{"lr": 1e-2, "eps": 1e-12, **optimizer}),
        training=TrainingConfig(steps=10), data=DataConfig(synthetic=True),
    )


def batch_of(number: int = 0) -> MicroBatch:
    both = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(number))
    return MicroBatch((0, 1, 2, 3), tokens=both[:, :-1], labels=both[:, 1:])


def engine_of(config: RunConfig, provider: str = "torch") -> NativeEngine:
    providers = dataclasses.replace(torch_providers(), optimizer=provider)
    engine = build_engine(config, ParallelContext.single(), providers)
    assert isinstance(engine, NativeEngine)
    return engine


def train(engine: NativeEngine, steps: int, start: int = 0, lr: float = 1e-2) -> None:
    for step in range(start, start + steps):
        engine.train_step([batch_of(step)], step=step, lr=lr)


def weights(engine: NativeEngine) -> dict[str, torch.Tensor]:
    return {record.name: p.detach().clone() for record, p in engine.named_parameters()}


# ------------------------------------------------------------------------------------------------ muP


def movement(width: int, base: int) -> dict[str, float]:
    """Root mean square by which four updates change the outputs of parts of a model (Tensor Programs V, section 8)."""
    config = config_of(clip_grad=0.0, weight_decay=0.0)
    model = dataclasses.replace(
        MODEL, hidden_size=width, num_attention_heads=width // 8, mup_base_size=base, tie_embeddings=False
    )
    engine = engine_of(dataclasses.replace(config, model=model, precision=PrecisionConfig(dtype="fp32")))
    stage: Any = engine.stage
    branches = {"attention": stage.layers[1].attention.output, "mlp": stage.layers[1].mlp.down}
    parts, seen = {**branches, "logits": stage.head}, {}
    for name, part in parts.items():
        part.register_forward_hook(
            lambda module, inputs, out, name=name: seen.__setitem__(name, out[0] if isinstance(out, tuple) else out)
        )
    engine.eval_step([batch_of()])
    before = {name: out.clone() for name, out in seen.items()}
    for step in range(4):
        engine.train_step([batch_of()], step=step, lr=1e-2)
    engine.eval_step([batch_of()])
    return {name: float((seen[name] - out).square().mean().sqrt()) for name, out in before.items()}


def test_coordinates_move_alike_at_every_width() -> None:
    narrow, wide, plain = movement(32, 32), movement(256, 32), movement(256, 0)
    assert movement(32, 0) == narrow
    for name, moved in narrow.items():
        assert 0.4 < wide[name] / moved < 1.5, name
        assert plain[name] / moved > 4, name


# ------------------------------------------------------------------------------------------------ groups


@pytest.mark.parametrize(("name", "of"), [
    ("embedding.word.weight", "embedding"), ("embedding.position.weight", "embedding"), ("head.weight", "head"),
    ("head.bias", "head"), ("layers.0.norm1.weight", "norm"), ("layers.3.post_norm2.weight", "norm"),
    ("layers.1.norm2.bias", "bias"), ("final_norm.weight", "norm"), ("layers.0.attention.key_norm.weight", "norm"),
    ("layers.0.attention.qkv.weight", "matrix"), ("layers.0.attention.output.bias", "bias"),
    ("layers.0.mlp.experts.up.weight", "matrix"), ("layers.0.mlp.router.weight", "matrix"),
    ("layers.0.attention.sinks", "other"), ("mtp.0.projection.weight", "matrix"),
    ("mtp.0.embedding_norm.weight", "norm"),
])
def test_classes(name: str, of: str) -> None:
    assert parameter_class(name) == of


def test_what_decays_is_a_matrix_a_table_or_the_head() -> None:
    model = dataclasses.replace(MODEL, qk_norm=True, moe=MoEConfig(num_experts=4), tie_embeddings=False)
    for name, record in state_records(model).items():
        assert record.decay is (parameter_class(name) in ("matrix", "embedding", "head")), name


@pytest.mark.parametrize("provider", ["torch", "own"])
def test_groups_are_torchs(provider: str) -> None:
    """torch.optim.AdamW over the whole parameters, with groups as one writes them there."""
    if provider == "own":
        if not kernels_status("cpu")[0]:
            pytest.skip("own kernels are not built")
        load_kernels("cpu")
    groups = (
        ParameterGroup(match="layers.1.mlp.*", lr_factor=0.5, weight_decay=0.4),
        ParameterGroup(match="bias", lr_factor=2.0, weight_decay=0.3), ParameterGroup(match="embedding", lr_factor=0.0),
    )
    config = config_of(groups=groups, clip_grad=0.0, eps=1e-6)
    if provider == "own":
        config = dataclasses.replace(config, precision=PrecisionConfig(dtype="fp32"))
    engine = engine_of(config, provider)
    seen: list[dict[str, torch.Tensor]] = []
    engine.on_gradients = lambda found: seen.append({r.name: g.clone() for r, g in found})
    params = {name: torch.nn.Parameter(w.double()) for name, w in weights(engine).items()}

    def settings(name: str) -> tuple[float, float]:
        if name.startswith("layers.1.mlp."):
            return 0.5, 0.4
        if name.endswith(".bias"):
            return 2.0, 0.3
        if name.startswith("embedding."):
            return 0.0, 0.1
        return 1.0, 0.0 if "norm" in name else 0.1

    torchs = torch.optim.AdamW([
        {"params": [p], "lr": 1e-2 * settings(name)[0], "weight_decay": settings(name)[1]} for name, p in params.items()
    ], betas=(0.9, 0.95), eps=1e-6)
    train(engine, 3)
    for gradients in seen:
        for name, p in params.items():
            p.grad = gradients[name].double()
        torchs.step()
    bound = 1e-12 if provider == "torch" else 2e-6
    for name, w in weights(engine).items():
        assert (w.double() - params[name]).abs().max() <= bound, name


def test_groups_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'engine = "native"\n[data]\nsynthetic = true\n[[optimizer.groups]]\nmatch = "norm"\nlr_factor = 2\n'
        '[[optimizer.groups]]\nmatch = "layers.*.mlp.*"\nweight_decay = 0.5\n[optimizer]\nlr = 1e-3\n'
    )
    loaded = load(file)
    wanted = (ParameterGroup(match="norm", lr_factor=2.0), ParameterGroup(match="layers.*.mlp.*", weight_decay=0.5))
    assert loaded.config.optimizer.groups == wanted and loaded.origins["optimizer.groups"].endswith("run.toml:4")
    assert loaded.origins["optimizer.lr"].endswith("run.toml:11")
    (tmp_path / "again.toml").write_text(to_toml(loaded.config))
    assert load(tmp_path / "again.toml").config == loaded.config
    assert load(file, ['optimizer.groups=[{match="bias"}]']).config.optimizer.groups == (ParameterGroup(match="bias"),)
    assert config_hash(loaded.config) != config_hash(load(file, ["optimizer.groups=[]"]).config)


@pytest.mark.parametrize(("source", "says"), [
    ("[3]", "an array of tables, not with the integer 3"), ('[{lr_factor=1.0}]', "a table without match"),
    ('[{match="norm", lr_facto=1.0}]', "did you mean 'lr_factor'"), ('[{match=1}]', "whose match must be a string"),
    ('{match="norm"}', "must be an array of tables"),
])
def test_groups_that_are_none(source: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(None, [f"optimizer.groups={source}"])


@pytest.mark.parametrize(("change", "says"), [
    ({"groups": (ParameterGroup(match="norm", lr_factor=-1.0),)}, "lr_factor is -1.0"),
    ({"groups": (ParameterGroup(match="norm", weight_decay=-0.5),)}, "weight_decay is -0.5"),
    ({"groups": (ParameterGroup(match="norm"),) * 2}, "'norm' twice"),
    ({"groups": (ParameterGroup(match=" "),)}, "has no match"),
    ({"ema_evaluate": True}, "set ema_decay"), ({"wsd_steps": 3}, 'is of decay = "wsd"'),
    ({"decay": "wsd", "wsd_steps": 9, "warmup_steps": 3}, "wsd_steps of at most 7"),
])
def test_refused_settings(change: dict[str, Any], says: str) -> None:
    assert any(says in p for p in problems(config_of(**change)))


@pytest.mark.parametrize("change", [{"clip_value": 1.0}, {"clip_zscore": 2.5}, {"ema_decay": 0.9}])
def test_what_deepspeed_cannot_do_is_refused_by_name(change: dict[str, float]) -> None:
    config = dataclasses.replace(config_of(**change), engine="deepspeed", precision=PrecisionConfig(dtype="fp32"))
    assert any(f"optimizer.{name}" in p for name in change for p in problems(config))
    assert not problems(dataclasses.replace(config, engine="native"))


def test_z_loss_of_another_loss_is_refused() -> None:
    config = dataclasses.replace(config_of(), training=TrainingConfig(z_loss=1e-4, loss="dpo"))
    assert any("training.z_loss" in p for p in problems(config))


def test_a_group_without_parameters_is_refused() -> None:
    groups = (ParameterGroup(match="layers.*"), ParameterGroup(match="layers.0.*"))
    with pytest.raises(ConfigError, match=r"group 2.*'layers\.0\.\*'"):
        engine_of(config_of(groups=groups))


# ------------------------------------------------------------------------------------------------ clipping


def test_adaptive_clipping_is_the_papers() -> None:
    """ZClip's Algorithm: the mean and variance of the first norms, then decaying ones, of norms as clipped."""
    random = np.random.default_rng(4)
    norms = random.normal(2.0, 0.3, 60)
    norms[[8, 20, 33]] = (9.0, 4.0, 30.0)
    statistics = AdaptiveClipping(OptimizerConfig(clip_zscore=2.5, clip_decay=0.9, clip_warmup=12))
    clipped = []
    for t, g in enumerate(norms):
        mean, deviation = statistics.now
        if t < 12:
            assert deviation > 1e300
            clipped.append(g)
        else:
            wanted_mean, wanted_variance = np.mean(clipped[:12]), np.var(clipped[:12])
            for before in clipped[12:]:
                wanted_mean = 0.9 * wanted_mean + 0.1 * before
                wanted_variance = 0.9 * wanted_variance + 0.1 * (before - wanted_mean) ** 2
            assert (mean, deviation) == pytest.approx((wanted_mean, wanted_variance**0.5), rel=1e-12)
            z = (g - mean) / deviation
            clipped.append(mean + 2.5**2 / z * deviation if z > 2.5 else g)
        statistics.account(float(g))
    assert clipped[8] == 9.0 and clipped[33] < 6.0
    again = AdaptiveClipping(OptimizerConfig(clip_zscore=2.5, clip_decay=0.9, clip_warmup=12))
    again.load(statistics.state())
    assert again.now == statistics.now and NormStatistics().state() == {}


@pytest.mark.parametrize("provider", ["torch", "own"])
def test_gradients_are_clipped_by_value(provider: str) -> None:
    """With beta1 0 and lr 0 the first moment is the gradient that the update got."""
    if provider == "own":
        if not kernels_status("cpu")[0]:
            pytest.skip("own kernels are not built")
        load_kernels("cpu")
    config = config_of(beta1=0.0, clip_grad=0.1, clip_value=1e-3, lr=1e-9)
    engine = engine_of(dataclasses.replace(config, precision=PrecisionConfig(dtype="fp32")), provider)
    seen: list[dict[str, torch.Tensor]] = []
    engine.on_gradients = lambda found: seen.append({r.name: g.clone() for r, g in found})
    norm = engine.train_step([batch_of()], step=0, lr=1e-9).grad_norm
    assert norm is not None and norm > 0.1
    found = {p.name: p.tensor.view(p.shape) for p in engine.state_pieces() if p.kind == "exp_avg"}
    for name, gradient in seen[0].items():
        wanted = (gradient * (0.1 / norm)).clamp(-1e-3, 1e-3)
        torch.testing.assert_close(found[name], wanted[: len(found[name])], rtol=1e-5, atol=1e-9)
    assert max(float(t.max()) for t in found.values()) == pytest.approx(1e-3)


# ------------------------------------------------------------------------------------------------ averaged weights


def saved(engine: NativeEngine, config: RunConfig, folder: Path, step: int) -> Path:
    records = state_records(config.model)
    state = state_of(engine, config, Position(step=step, samples=4 * step, skipped=0), records)
    return save_checkpoint(folder, state, engine.state_pieces(), expected=parameter_shapes(config.model))


def test_the_average_is_the_formulas_and_resumes(tmp_path: Path) -> None:
    config = config_of(ema_decay=0.6, ema_evaluate=True, clip_zscore=0.5, clip_warmup=2)
    engine, wanted = engine_of(config), dict[str, torch.Tensor]()
    for step in range(4):
        train(engine, 1, step)
        now = weights(engine)
        wanted = {n: w if step == 0 else 0.6 * wanted[n] + 0.4 * w for n, w in now.items()}
        if step == 1:
            path = saved(engine, config, tmp_path, 2)
    averaged = {p.name: p.tensor.view(p.shape) for p in engine.state_pieces() if p.kind == "ema"}
    for name, w in wanted.items():
        torch.testing.assert_close(averaged[name], w[: len(averaged[name])], rtol=1e-12, atol=1e-14)
    checkpoint = open_checkpoint(path)
    resumed = build_engine(config, ParallelContext.single(), torch_providers(), initialise=False)
    assert isinstance(resumed, NativeEngine)
    resumed.load_state(checkpoint.read, checkpoint.scalars)
    train(resumed, 2, 2)
    ours, theirs = ({(p.name, p.kind): p.tensor for p in e.state_pieces()} for e in (engine, resumed))
    assert ours.keys() == theirs.keys() and all(torch.equal(t, theirs[k]) for k, t in ours.items())
    assert engine.scalar_state() == resumed.scalar_state()
    with engine.evaluated_weights():
        by_average = engine.eval_step([batch_of()]).loss
    only = build_engine(config, ParallelContext.single(), torch_providers(), initialise=False)
    read = AveragedCheckpoint(open_checkpoint(saved(engine, config, tmp_path, 4))).read
    only.load_weights(read)
    assert only.eval_step([batch_of()]).loss == by_average != engine.eval_step([batch_of()]).loss
    plain = config_of()
    with pytest.raises(CheckpointError, match="no averaged weights"):
        AveragedCheckpoint(open_checkpoint(saved(engine_of(plain), plain, tmp_path, 6)))


@pytest.mark.parametrize("name", OPTIMIZERS.builtin)
def test_every_rule_trains_beside_its_average_as_without(name: str) -> None:
    config = config_of(name=name, ema_decay=0.6)
    engine, plain, wanted = engine_of(config), engine_of(config_of(name=name)), dict[str, torch.Tensor]()
    for step in range(3):
        train(engine, 1, step)
        train(plain, 1, step)
        now = weights(plain)
        wanted = {n: w if step == 0 else 0.6 * wanted[n] + 0.4 * w for n, w in now.items()}
    assert all(torch.equal(w, now[n]) for n, w in weights(engine).items())
    averaged = {p.name: p.tensor.view(p.shape) for p in engine.state_pieces() if p.kind == "ema"}
    assert averaged.keys() == wanted.keys()
    for n, w in wanted.items():
        torch.testing.assert_close(averaged[n], w[: len(averaged[n])], rtol=1e-12, atol=1e-14)


def test_a_refused_update_leaves_the_average_alone() -> None:
    engine = engine_of(config_of(ema_decay=0.6))
    train(engine, 2)
    before = {p.name: p.tensor.clone() for p in engine.state_pieces() if p.kind == "ema"}
    assert engine.average is not None
    engine.average.update(torch.ones(()))
    assert all(torch.equal(before[p.name], p.tensor) for p in engine.state_pieces() if p.kind == "ema")
