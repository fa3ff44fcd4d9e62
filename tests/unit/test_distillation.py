"""The loss that a teacher also judges: plain torch's, over transformers' models, and over what a file keeps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_models import gpt2
from transformers import AutoModelForCausalLM

from megatron_port.core.config.checks import problems, resolve
from megatron_port.core.config.features import DistillationConfig
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import (
    BackendConfig,
    BatchConfig,
    DataConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    TrainingConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import record_of
from megatron_port.core.errors import CheckpointError, ConfigError
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.ext.objectives.distillation import Objective, Stored, vocab_parallel_distillation
from megatron_port.ext.objectives.distilled import open_teacher, vocab_parallel_top
from megatron_port.run.build import build_engine, build_model, topology_of
from megatron_port.tools.interop.hf_files import HFFolder
from megatron_port.tools.plan.case import case_of, machine_of
from megatron_port.tools.plan.dry_run import build_every_rank
from megatron_port.tools.plan.memory import teacher_bytes
from megatron_port.tools.plan.step import chunk_costs

OBJECTIVES = (
    Objective(0.3, 2.5), Objective(0.3, 2.5, reverse=True), Objective(0.0, 1.0), Objective(0.9, 0.7, reverse=True),
)


def plain_kl(s: torch.Tensor, t: torch.Tensor, objective: Objective) -> torch.Tensor:
    """torch's, of whole distributions: log-probabilities of the model and the teacher [..., outcomes] → [...]."""
    a, b = (t, s) if objective.reverse else (s, t)
    return F.kl_div(a, b, reduction="none", log_target=True).sum(-1)


def plain_loss(s: torch.Tensor, t: torch.Tensor, labels: torch.Tensor, objective: Objective) -> torch.Tensor:
    """The loss of each token from whole logits."""
    hard = F.cross_entropy(s.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    soft = plain_kl((s / objective.temperature).log_softmax(-1), (t / objective.temperature).log_softmax(-1), objective)
    return objective.alpha * hard + (1 - objective.alpha) * objective.temperature**2 * soft


def coarse(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the tokens ``ids`` and of any other one, of whole log-probabilities."""
    others = torch.ones_like(x).scatter(-1, ids, 0.0).bool()
    rest = x.masked_fill(~others, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat((x.gather(-1, ids), rest), dim=-1)


def keep(t: torch.Tensor, k: int, temperature: float) -> Stored:
    """What a file keeps of whole logits."""
    whole = (t / temperature).log_softmax(-1)
    ids = whole.topk(k, dim=-1).indices
    found = coarse(whole, ids)
    return Stored(ids, found[..., :-1], found[..., -1])


def drawn(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    s, t = (3 * torch.randn(6, 4, 19, generator=g, dtype=torch.float64) for _ in range(2))
    return s.to(dtype), t.to(dtype), torch.randint(0, 19, (6, 4), generator=g)


def ours(s: torch.Tensor, labels: torch.Tensor, target: torch.Tensor | Stored, objective: Objective) -> Any:
    """(loss of each token, its parts, gradient of a weighted sum), with three columns of padding that hold anything."""
    padded = F.pad(s, (0, 3), value=50.0)
    if isinstance(target, torch.Tensor):
        target = F.pad(target, (0, 3), value=-70.0)
    x = padded.requires_grad_()
    loss, ce, kl = vocab_parallel_distillation(x * 1.0, labels, target, objective, offset=0, extent=19, group=None)
    (loss * weights(labels)).sum().backward()
    assert x.grad is not None and not x.grad[..., 19:].any()
    return loss, ce, kl, x.grad[..., :19]


def weights(labels: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.1, 2.0, labels.numel(), dtype=torch.float64).view(labels.shape)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_loss_and_gradient_are_plain_torchs(objective: Objective) -> None:
    s, t, labels = drawn()
    x = s.clone().requires_grad_()
    wanted = plain_loss(x, t, labels, objective)
    (wanted * weights(labels)).sum().backward()
    loss, ce, kl, grad = ours(s, labels, t, objective)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, x.grad, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(ce, F.cross_entropy(s.flatten(0, 1), labels.flatten(), reduction="none").view(6, 4))
    assert (kl > 0).all()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("k", [1, 5, 19])
def test_kept_tokens_and_one_outcome_for_the_rest(objective: Objective, k: int) -> None:
    s, t, labels = drawn()
    stored, x = keep(t, k, objective.temperature), s.clone().requires_grad_()
    whole = (x / objective.temperature).log_softmax(-1)
    theirs = torch.cat((stored.log_probabilities, stored.log_tail[..., None]), dim=-1)
    here = coarse(whole, stored.ids)
    if k == 19:  # no other token is left
        theirs, here = theirs[..., :-1], here[..., :-1]
    hard = F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    wanted = objective.alpha * hard
    wanted = wanted + (1 - objective.alpha) * objective.temperature**2 * plain_kl(here, theirs, objective)
    (wanted * weights(labels)).sum().backward()
    loss, _, kl, grad = ours(s, labels, stored, objective)
    torch.testing.assert_close(loss, wanted, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(grad, x.grad, rtol=1e-11, atol=1e-11)
    dense = ours(s, labels, t, objective)[2]
    assert (kl <= dense + 1e-12).all(), "the coarser distributions are never further apart"
    if k == 19:
        torch.testing.assert_close(kl, dense, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("k", [1, 5, 19])
def test_what_a_file_keeps_is_at_its_temperature(temperature: float, k: int) -> None:
    """torch's log_softmax and topk; padding holds anything."""
    _, t, _ = drawn()
    wanted = keep(t, k, temperature)
    found = vocab_parallel_top(F.pad(t, (0, 3), value=90.0), k, temperature, offset=0, extent=19, group=None)
    assert torch.equal(found.ids, wanted.ids)
    torch.testing.assert_close(found.log_probabilities, wanted.log_probabilities, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.log_tail.exp(), wanted.log_tail.exp(), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_logits_are_judged_in_fp32(dtype: torch.dtype) -> None:
    s, t, labels = drawn(dtype)
    x = s.double().requires_grad_()
    wanted = plain_loss(x, t.double(), labels, OBJECTIVES[0])
    (wanted * weights(labels)).sum().backward()
    loss, _, _, grad = ours(s, labels, t, OBJECTIVES[0])
    assert loss.dtype == torch.float32 and grad.dtype == dtype
    torch.testing.assert_close(loss.double(), wanted, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(grad.double(), x.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_a_second_backward_pass_is_refused() -> None:
    s, t, labels = drawn()
    loss = vocab_parallel_distillation(
        s.requires_grad_(), labels, t, OBJECTIVES[0], offset=0, extent=19, group=None)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        loss.backward()


# -- a model -----------------------------------------------------------------------------------------------------------


def saved(folder: Path, scale: float = 4.0, **changes: Any) -> Any:
    """A random GPT-2 of transformers' in ``folder``, in fp64, with weights larger than usual ones."""
    torch.manual_seed(len(folder.name))
    model = AutoModelForCausalLM.from_config(gpt2(**{"length": 12, **changes})).double()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(scale)
    model.save_pretrained(folder)
    return model


def run_of(folder: Path, **distillation: Any) -> RunConfig:
    """A run of the model of a folder that learns from a teacher."""
    return RunConfig(
        engine="native", model=HFFolder(folder).model,
        precision=PrecisionConfig(dtype="fp64"), batch=BatchConfig(micro_batch_size=2, global_batch_size=4),
        optimizer=OptimizerConfig(clip_grad=0.0),
        data=DataConfig(synthetic=True, attention_documents="within", position_reset=True),
        backend=BackendConfig(device="cpu", attention="math"), training=TrainingConfig(steps=1),
        distillation=DistillationConfig(**distillation),
    )


def documents() -> list[MicroBatch]:
    """Two micro-batches: two documents in each sample, and labels that do not count."""
    g = torch.Generator().manual_seed(3)
    out = []
    for m in range(2):
        tokens = torch.randint(0, 101, (2, 13), generator=g)
        mask = (torch.rand(2, 12, generator=g) < (0.3, 0.9)[m]).float()
        starts = torch.zeros(2, 12, dtype=torch.int32)
        starts[0, 5:], starts[1, 7:] = 5, 7
        out.append(MicroBatch((2 * m, 2 * m + 1), tokens[:, :-1], tokens[:, 1:], mask, labels_masked=True,
                              document_starts=starts))
    return out


def alone(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Logits [batch, seq, vocabulary] of documents that transformers reads one by one."""
    assert batch.tokens is not None and batch.document_starts is not None
    rows = []
    for tokens, starts in zip(batch.tokens, batch.document_starts):
        edges = [*starts.unique().tolist(), len(tokens)]
        rows.append(torch.cat([model(tokens[None, a:b]).logits[0] for a, b in zip(edges, edges[1:])]))
    return torch.stack(rows)


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_a_step_is_that_of_two_models_of_transformers(tmp_path: Path, divergence: Any) -> None:
    """The teacher has another width, other heads and its own number of layers."""
    student = saved(tmp_path / "student")
    teacher = saved(tmp_path / "teacher", n_embd=80, n_head=5, n_layer=4)
    config = run_of(tmp_path / "student", teacher=str(tmp_path / "teacher"), alpha=0.25, temperature=2.0,
                    divergence=divergence)
    assert not problems(config)
    engine = build_engine(config, ParallelContext.single(), torch_providers(), initialise=False)
    engine.load_weights(HFFolder(tmp_path / "student").read)
    found: dict[str, torch.Tensor] = {}
    engine.on_gradients = lambda pairs: found.update((r.name, g.clone()) for r, g in pairs)  # type: ignore[attr-defined]
    result = engine.train_step(documents(), step=0, lr=1e-3)

    objective, total, count, kl = Objective(0.25, 2.0, reverse=divergence == "reverse"), 0.0, 0.0, 0.0
    for batch in documents():
        assert batch.labels is not None and batch.loss_mask is not None
        s, mask = alone(student, batch), batch.loss_mask
        with torch.no_grad():
            t = alone(teacher, batch)
        loss = (plain_loss(s, t, batch.labels, objective) * mask).sum()
        loss.backward()
        total, count = total + loss.item(), count + float(mask.sum())
        kl += (plain_kl((s / 2).log_softmax(-1), (t / 2).log_softmax(-1), objective) * mask).sum().item()
    assert result.loss == pytest.approx(total / count, rel=1e-12) and result.tokens == count
    assert result.auxiliary["teacher_kl"] == pytest.approx(kl, rel=1e-6)
    grads = {name: p.grad / count for name, p in student.named_parameters()}
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-11)
    for name, theirs in (("layers.2.mlp.down.weight", grads["transformer.h.2.mlp.c_proj.weight"].t()),
                         ("layers.0.norm1.weight", grads["transformer.h.0.ln_1.weight"]),
                         ("embedding.word.weight", grads["transformer.wte.weight"])):
        torch.testing.assert_close(found[name][: len(theirs)], theirs, rtol=1e-9, atol=1e-13)
    assert not any(name.startswith("teacher.") for name in found)


def test_evaluations_report_the_cross_entropy(tmp_path: Path) -> None:
    saved(tmp_path / "student")
    config = run_of(tmp_path / "student", teacher=str(tmp_path / "student"), alpha=0.0)
    plain = dataclasses.replace(config, distillation=DistillationConfig())
    losses = []
    for c in (config, plain):
        engine = build_engine(c, ParallelContext.single(), torch_providers(), initialise=False)
        engine.load_weights(HFFolder(tmp_path / "student").read)
        losses.append(engine.eval_step(documents()).loss)
        if c is config:  # the teacher is the model itself
            assert engine.train_step(documents(), step=0, lr=1e-3).loss == pytest.approx(0.0, abs=1e-12)
            assert {name for piece in engine.state_pieces() if (name := piece.name).startswith("teacher.")} == set()
    assert losses[0] == losses[1]


# -- what is refused ---------------------------------------------------------------------------------------------------

Change = Callable[[RunConfig], RunConfig]


@pytest.mark.parametrize(("changes", "words"), [
    ({"vocab_size": 99}, "vocabulary has 99 tokens and the model's 101"),
    ({"length": 8}, "sequences of 8 tokens, and model.seq_length is 12"),
])
def test_a_teacher_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    saved(tmp_path / "student")
    saved(tmp_path / "teacher", **changes)
    with pytest.raises(ConfigError, match=words):
        open_teacher(run_of(tmp_path / "student", teacher=str(tmp_path / "teacher")))


def test_a_teacher_that_cannot_be_split_as_the_run_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "student")
    saved(tmp_path / "teacher", n_head=3, n_embd=48, n_layer=1)
    base = run_of(tmp_path / "student", teacher=str(tmp_path / "teacher"))
    for sizes, words in (({"tensor_parallel_size": 2}, "split as the run is: .*3"),
                         ({"pipeline_parallel_size": 2}, "1 layers for 2 stages")):
        layout = dataclasses.replace(base.layout, **sizes)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=words):
            open_teacher(dataclasses.replace(base, layout=layout))


def test_a_missing_teacher_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "student")
    with pytest.raises(CheckpointError, match=r'distillation.teacher = ".*nobody": .* is neither'):
        open_teacher(run_of(tmp_path / "student", teacher=str(tmp_path / "nobody")))


@pytest.mark.parametrize(("change", "words"), [
    (lambda c: dataclasses.replace(c, engine="deepspeed"), 'engine "deepspeed"'),
    (lambda c: dataclasses.replace(c, training=TrainingConfig(loss="dpo")), "training.loss 'dpo'"),
    (lambda c: dataclasses.replace(c, training=TrainingConfig(z_loss=1e-4)), "z_loss"),
    (lambda c: dataclasses.replace(c, distillation=DistillationConfig(alpha=0.1)), "learns from nobody"),
])
def test_settings_that_contradict_are_refused(tmp_path: Path, change: Change, words: str) -> None:
    saved(tmp_path / "student")
    found = problems(change(run_of(tmp_path / "student", teacher="x")))
    assert any("distillation" in problem and words in problem for problem in found), found




# -- what it takes -----------------------------------------------------------------------------------------------------


def test_the_planner_counts_the_teacher_as_the_ranks_hold_it(tmp_path: Path) -> None:
    """Weights of each stage as built, the logits of one micro-batch, and the seconds of its forward pass."""
    saved(tmp_path / "student", n_layer=4)
    saved(tmp_path / "teacher", n_embd=80, n_head=4, n_layer=5)
    config = run_of(tmp_path / "student", teacher=str(tmp_path / "teacher"))
    layout = dataclasses.replace(config.layout, tensor_parallel_size=2, pipeline_parallel_size=2, zero_stage=1)
    config = resolve(dataclasses.replace(config, layout=layout), 4)
    (case, _), topology = case_of(config), topology_of(config)
    build_every_rank(config, topology)  # the ranks hold every element of the teacher once
    for stage in range(2):
        rank = topology.first_rank(pp=stage)
        ctx = ParallelContext(topology, rank, torch.device("meta"), topology.coordinates(rank))
        chunks = build_model(config, ctx, torch_providers(), StepSlot(DropoutStream(0, ctx.device)))
        records = [record_of(p) for chunk in chunks for p in chunk.parameters()]
        held = sum(math.prod(r.local_shape) for r in records if r.name.startswith("teacher."))
        logits = 2 * 12 * 128 * 8 if stage == 1 else 0
        assert teacher_bytes(case, stage) == (8 * held, logits)
    machine = machine_of(load("clusters/frontier").config)
    alone = dataclasses.replace(case, teacher=None)
    assert case.of_teacher is not None
    beside = chunk_costs(case.of_teacher, machine)
    for mine, without, teacher in zip(chunk_costs(case, machine), chunk_costs(alone, machine), beside):
        assert mine.forward == pytest.approx(without.forward + teacher.forward)
        assert mine.backward == without.backward
