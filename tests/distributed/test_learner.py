"""A script that drives the engine: on every layout the numbers of one process, and those of the engine's own step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import make_config, providers_of
from pool import RankPool
from test_policy_layouts import GPT, LLAMA, MOE, rollout_of

from megatron_port.core.config.features import FineTuningConfig
from megatron_port.core.config.schema import LayoutConfig, RunConfig
from megatron_port.core.data.dataset import Sample
from megatron_port.core.data.objective import Objective
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import ConfigError, DataError
from megatron_port.core.io.logging import Logger
from megatron_port.core.layers.step import StepContext
from megatron_port.core.model.decoder import GPTStage
from megatron_port.core.train.hooks import Session
from megatron_port.ext.objectives.policy import PolicyObjective
from megatron_port.ext.objectives.policy_settings import PolicyConfig
from megatron_port.ext.objectives.rollout_source import labels_of
from megatron_port.run.build import with_shared_layers
from megatron_port.tools.inference.generation import Sampling
from megatron_port.tools.posttrain.learner import Learner


class FocalLoss(Objective):
    """A user's loss: (1 - p)² times the cross-entropy of a token, and its mean confidence."""

    sums = ("confidence",)

    def loss(
        self, stage: GPTStage, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None,
        context: StepContext | None,
    ) -> torch.Tensor:
        assert stage.head is not None and context is not None and mask is not None
        losses = stage.head.token_losses(logits, labels)
        confidence = (-losses).exp()
        context.add_auxiliary("confidence", (confidence.detach() * mask).sum())
        return ((1 - confidence) ** 2 * losses * mask).sum()

    def metrics(self, sums: Any, count: int) -> dict[str, float | None]:
        return {"confidence": sums["confidence"] / count}


def text_of(number: int) -> Sample:
    """A sample of its number alone, some of whose labels count."""
    draw = np.random.default_rng(100 + number)
    length = int(draw.integers(5, 18))
    return Sample(draw.integers(0, 53, length), counted=draw.random(length - 1) < 0.8)


def weighted(number: int, factor: float = 1.0) -> Sample:
    sample = text_of(number)
    return dataclasses.replace(
        sample, side={"weights": factor * (1 + np.random.default_rng(number).random(len(sample.tokens) - 1))})


def answer_of(number: int, logprobs: np.ndarray | None = None) -> Sample:
    rollout, advantage = rollout_of(number)
    if logprobs is not None:
        rollout = dataclasses.replace(rollout, logprobs=np.concatenate([[0.0], logprobs]), further={})
    return labels_of(rollout, advantage, len(rollout.tokens) - 1)


def session_of(config: RunConfig, topology: Topology, folder: str) -> Session:
    """A session on this rank."""
    layout = config.layout
    ctx = ParallelContext.create(with_shared_layers(config, dataclasses.replace(
        topology, vp=layout.virtual_pipeline_size, folded=layout.pipeline_schedule == "zb-v",
        kv_copies=config.model.kv_heads_held(topology.tp) // config.model.kv_heads, shard=layout.shard_size)), "cpu")
    info = ProcessInfo(
        rank=ctx.rank, world_size=topology.world_size, local_rank=ctx.rank, local_world_size=topology.world_size,
        node_rank=0, num_nodes=1, master_addr="localhost", master_port=1, launcher="test", hostname="localhost")
    config = dataclasses.replace(config, output_dir=folder, layout=dataclasses.replace(
        layout, data_parallel_size=topology.dp, tensor_parallel_size=topology.tp, pipeline_parallel_size=topology.pp,
        context_parallel_size=topology.cp))
    return Session(config=config, info=info, device=ctx.device, ctx=ctx,  # type: ignore[arg-type]
                   providers=providers_of(config), logger=Logger(0))


def drive(config: RunConfig, topology: Topology, folder: str) -> dict[str, Any]:
    """Use each verb on this rank."""
    session = session_of(config, topology, folder)
    try:
        learner = Learner(session)
        told: list[Any] = []
        assert learner.load() is None
        for step in range(2):  # the run's own loss, of five samples: not as many as a batch
            told.append(learner.forward_backward([text_of(5 * step + i) for i in range(5)]))
            told.append(learner.optim_step(lr=1e-2))
        focal, policy = FocalLoss(config), PolicyObjective(config, PolicyConfig(method="gspo", kl=0.1))
        told.append(learner.forward_backward([text_of(20 + i) for i in range(6)], focal))
        told.append(learner.forward_backward([answer_of(i) for i in range(7)], policy))  # is added
        told.append(learner.optim_step(lr=1e-2))
        told.append(learner.forward_backward([weighted(20 + i) for i in range(5)], "weighted"))
        told.append(learner.optim_step(lr=1e-2))
        saved = learner.save()
        told.append(learner.evaluate([text_of(30 + i) for i in range(5)]))
        own = learner.logprobs([answer_of(i) for i in range(7)])
        current = learner.forward_backward(
            [answer_of(i, own[i]) for i in range(7)], PolicyObjective(config, PolicyConfig()))
        learner.optim_step()
        weights = {name: tensor.clone() for name, tensor in learner.weights()}
        again = learner.load(saved)
        assert again == saved and learner.step == 4
        after = learner.forward_backward([text_of(40 + i) for i in range(4)])
        texts = learner.generate([[1, 2, 3], [7], [5, 6]], Sampling(max_new_tokens=6, temperature=0.0))
        with pytest.raises(ConfigError, match="save while gradients wait"):
            learner.save()
        return {"told": told, "logprobs": own, "current": current, "weights": weights, "after": after,
                "texts": [one.tokens for one in texts]}
    finally:
        session.ctx.close()


CASES: list[tuple[dict[str, Any], dict[str, Any], Topology]] = [
    (LLAMA, {"sequence_parallel": True}, Topology(tp=2)),
    (GPT, {"pipeline_schedule": "zb-v", "virtual_pipeline_size": 2}, Topology(pp=2)),
    (LLAMA, {"cp_method": "ring"}, Topology(cp=2)),
    (LLAMA, {"zero_stage": 3}, Topology(dp=2)),
    (MOE, {"expert_parallel_size": 2}, Topology(dp=2, ep=2)),
]


def numbers(found: dict[str, Any]) -> dict[str, Any]:
    """What all layouts share."""
    return {
        "told": [{k: value for k, value in vars(one).items() if isinstance(value, float)} for one in found["told"]],
        "metrics": [getattr(one, "metrics", {}) for one in found["told"]], "after": found["after"].loss,
        "logprobs": found["logprobs"], "weights": found["weights"], "texts": found["texts"],
    }


def same(ours: Any, theirs: Any, where: str = "") -> None:
    """Compare to 1e-9."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for name in ours:
            same(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), where
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            same(a, b, f"{where}[{i}]")
    elif isinstance(ours, (np.ndarray, torch.Tensor)):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-7, atol=1e-9, err_msg=where)
    else:
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9), where


def run_all(cases: Sequence[tuple[RunConfig, Topology]], folder: str) -> list[dict[str, Any]]:
    return [drive(config, topology, f"{folder}/{i}") for i, (config, topology) in enumerate(cases)]


def test_each_verb_is_that_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    cases = [(make_config(dtype="fp64", model=model, layout=layout), topology) for model, layout, topology in CASES]
    results = ranks.run(2, run_all, cases, str(tmp_path / "ranks"), timeout=300)
    for i, (config, topology) in enumerate(cases):
        (tmp_path / f"alone{i}").mkdir()
        plain = dataclasses.replace(config, layout=LayoutConfig(vocab_padding_multiple=1))
        alone = drive(plain, Topology(), str(tmp_path / f"alone{i}"))
        assert alone["told"][0].loss > 3 and alone["told"][5].metrics["policy_ratio"] != 1
        for result in results:
            same(numbers(result[i]), numbers(alone), f"{topology}")


def policy_sees_itself(config: RunConfig, topology: Topology, folder: str) -> tuple[float, float, bool]:
    """Ratio and divergence of a policy from itself, by the log-probabilities that it stated."""
    session = session_of(config, topology, folder)
    try:
        learner = Learner(session)
        own = learner.logprobs([answer_of(i) for i in range(8)])
        found = learner.forward_backward([answer_of(i, own[i]) for i in range(8)],
                                         PolicyObjective(config, PolicyConfig()))
        return found.metrics["policy_ratio"], found.metrics["policy_kl"], own[0].dtype == np.float32  # type: ignore
    finally:
        session.ctx.close()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_stated_log_probabilities_are_those_of_the_pass_that_trains_bit_for_bit(
    ranks: RankPool, tmp_path: Path, dtype: str
) -> None:
    config = make_config(dtype=dtype, model={**LLAMA, "hidden_dropout": 0.0}, layout={"sequence_parallel": True})
    for topology in (Topology(tp=2), Topology(dp=2)):
        for found in ranks.run(2, policy_sees_itself, config, topology, str(tmp_path), timeout=120):
            assert found == (1.0, 0.0, True)


def test_gradients_of_batches_are_added_until_the_update(tmp_path: Path) -> None:
    """One batch twice has twice its gradients; the next update begins anew. A step of the engine's own is the same."""
    config = make_config(dtype="fp64", model=LLAMA)
    norms: list[Any] = []
    weights = []
    for times in (1, 2):
        session = session_of(config, Topology(), str(tmp_path))
        try:
            learner = Learner(session)
            for _ in range(2):
                for _ in range(times):
                    learner.forward_backward([text_of(i) for i in range(4)])
                norms.append(learner.optim_step(lr=0.0).grad_norm)
            learner.forward_backward([text_of(i) for i in range(4)])
            learner.optim_step(lr=1e-2)
            weights.append(next(iter(learner.weights()))[1])
        finally:
            session.ctx.close()
    assert norms == pytest.approx([norms[0], norms[0], 2 * norms[0], 2 * norms[0]], rel=1e-12)
    session = session_of(config, Topology(), str(tmp_path))
    try:
        learner = Learner(session)
        for step in range(3):
            batches = learner._divided([text_of(i) for i in range(4)], training=True)
            result = learner.engine.train_step(batches, step=step, lr=1e-2 * (step == 2))
        assert result.grad_norm == norms[0]
        assert torch.equal(next(iter(learner.weights()))[1], weights[0])
    finally:
        session.ctx.close()


def test_weights_are_a_mean_over_their_sum(tmp_path: Path) -> None:
    """By the log-probabilities of labels; a sample of weight 0 is as good as none, and a common factor is none."""
    config = make_config(dtype="fp64", model=LLAMA)
    session = session_of(config, Topology(), str(tmp_path))
    try:
        learner, found = Learner(session), []
        samples = [weighted(i) for i in range(4)]
        logs = learner.logprobs(samples)
        plain = -sum(p[s.counted].sum() for s, p in zip(samples, logs, strict=True)) / sum(
            int(np.asarray(s.counted).sum()) for s in samples)
        assert learner.evaluate(samples).loss == pytest.approx(plain, rel=1e-12)
        counted = [np.where(np.asarray(s.counted), s.side["weights"], 0) for s in samples]
        expected = -sum((w * p).sum() for w, p in zip(counted, logs, strict=True)) / sum(w.sum() for w in counted)
        for batch in (samples, [weighted(i, 3.0) for i in range(4)], [*samples, weighted(9, 0.0)]):
            losses = learner.forward_backward(batch, "weighted")
            found.append((losses.loss, learner.optim_step(lr=0.0).grad_norm))
        assert found[0][0] == pytest.approx(expected, rel=1e-12)
        assert learner.evaluate(samples, "weighted").loss == pytest.approx(expected, rel=1e-12)
        assert all(one == pytest.approx(found[0], rel=1e-12) for one in found)
        assert learner.forward_backward(samples, "weighted").count == pytest.approx(sum(w.sum() for w in counted))
        learner.optim_step(lr=0.0)
        with pytest.raises(DataError, match="sample 1 has no weights"):
            learner.forward_backward([weighted(0), text_of(1)], "weighted")
        with pytest.raises(DataError, match="sample 0 has a weight of -"):
            learner.forward_backward([weighted(0, -1.0)], "weighted")
    finally:
        session.ctx.close()


def test_log_probabilities_in_between_change_no_update(tmp_path: Path) -> None:
    """Of fp16 with its scale; the rate that is reported is the update's."""
    found = []
    for asks in (False, True):
        session = session_of(make_config(dtype="fp16", model=LLAMA), Topology(), str(tmp_path / str(asks)))
        try:
            learner = Learner(session)
            losses = learner.forward_backward([text_of(i) for i in range(4)])
            if asks:
                learner.logprobs([text_of(5)])
            result = learner.optim_step(lr=1e-3)
            learner.logprobs([text_of(5)])
            learner.report(losses, result)
            learner.close()
            (row,) = map(json.loads, (tmp_path / str(asks)).glob("*/metrics.jsonl").__next__().read_text().splitlines())
            assert result.loss_scale > 1 and row["learning_rate"] == 1e-3
            found.append((result.grad_norm, next(iter(learner.weights()))[1]))
        finally:
            session.ctx.close()
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_mistakes_are_named(tmp_path: Path) -> None:
    session = session_of(make_config(dtype="fp32", model=LLAMA), Topology(), str(tmp_path))
    try:
        learner = Learner(session)
        with pytest.raises(ConfigError, match="optim_step without gradients"):
            learner.optim_step()
        with pytest.raises(DataError, match=r"sample 1 has 40 tokens; the model takes 2 to 17"):
            learner.forward_backward([text_of(0), Sample(np.zeros(40, np.int64))])
        with pytest.raises(DataError, match="sample 0: token id 53 is outside the vocabulary of 53"):
            learner.forward_backward([Sample(np.array([1, 2, 3, 53]))])  # a label alone
        with pytest.raises(DataError, match="sample 0 has no share, which the loss of a policy reads"):
            learner.forward_backward([text_of(0)], PolicyObjective(session.config, PolicyConfig()))
        with pytest.raises(DataError, match="sample 0 has no ref_logprobs"):
            learner.forward_backward([answer_of(0, np.zeros(20)[: len(answer_of(0).tokens) - 1])],
                                     PolicyObjective(session.config, PolicyConfig(kl=0.1)))
        with pytest.raises(ConfigError, match="frozen weights"):
            Learner(dataclasses.replace(session, config=dataclasses.replace(
                session.config, fine_tuning=FineTuningConfig(method="lora"))))
        assert learner.forward_backward([text_of(0)], "cross_entropy").count > 2
        with pytest.raises(DataError, match="no samples"):
            learner.logprobs([])
    finally:
        session.ctx.close()
