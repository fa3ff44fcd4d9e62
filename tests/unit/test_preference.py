"""Pairs of answers: forms that are read, what counts, the stored reference, and the loss against plain torch."""

from __future__ import annotations

import json
import math
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hf_models as hf
import numpy as np
import pytest
import torch

from megatron_port.cli.main import main
from megatron_port.core.config.checks import problems
from megatron_port.core.config.schema import BatchConfig, DataConfig, RunConfig, TrainingConfig
from megatron_port.core.data.indexed import IndexedDataset, reference_path
from megatron_port.core.data.loader import Loaders, build_loaders
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.errors import DataError
from megatron_port.core.layers.providers import torch_providers
from megatron_port.ext.corpora.conversations import ConversationRefusal, preference_of
from megatron_port.ext.corpora.tokenizer import get_tokenizer
from megatron_port.ext.corpora.verify import verify
from megatron_port.ext.objectives.dpo import PairObjective, pair_loss_sum
from megatron_port.ext.objectives.pairs import read_reference
from megatron_port.run.build import build_engine
from megatron_port.tools.interop.hf_files import HFFolder
from megatron_port.tools.parity.comparison import gradient_deviation

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "chat"
USER, GOOD, BAD = ({"role": role, "content": text} for role, text in (
    ("user", "q"), ("assistant", "good"), ("assistant", "bad one")))
EARLIER = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "earlier"}]
FORMS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "texts": ({"prompt": "q", "chosen": "good", "rejected": "bad one", "score": 3}, [USER]),
    "messages beside a prompt": ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, [USER]),
    "messages alone": ({"chosen": [USER, GOOD], "rejected": [USER, BAD], "prompt": None}, [USER]),
    "a prompt said twice": ({"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
    "several turns": ({"chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]}, [*EARLIER, USER]),
    "a system's line": ({"prompt": "q", "chosen": "good", "rejected": "bad one", "system": "s"},
                        [{"role": "system", "content": "s"}, USER]),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "a label": ({"prompt": "q", "completion": "a", "label": True}, "found the keys prompt, completion, label"),
    "a ranking": ({"prompt": "q", "responses": ["a", "b"], "ranks": [1, 0]}, "keys prompt, responses, ranks"),
    "no prompt": ({"chosen": "Human: q Assistant: a", "rejected": "b"}, "is a text, and there is no prompt"),
    "the same": ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
    "other prompts": ({"chosen": [USER, GOOD], "rejected": [EARLIER[0], BAD]}, "no prompt in common"),
    "another prompt": ({"prompt": "x", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "not those of prompt"),
    "a beginning": ({"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}, "the beginning of the other"),
    "no answer": ({"chosen": [USER, GOOD], "rejected": [USER, BAD, USER]}, "rejected does not end with the assistant"),
    "tools": ({"prompt": "q", "chosen": "a", "rejected": "b", "tools": [{}]}, "tool calls"),
    "array": ([1], "an array; write one object per line"),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_that_are_read(form: str) -> None:
    record, prompt = FORMS[form]
    found = preference_of(record)
    assert found.chosen == [*prompt, GOOD] and found.rejected == [*prompt, BAD] and found.shared == len(prompt)


@pytest.mark.parametrize("form", REFUSED)
def test_forms_that_are_refused_by_their_keys(form: str) -> None:
    record, message = REFUSED[form]
    with pytest.raises(ConversationRefusal, match=message):
        preference_of(record)


def prepared(folder: Path, *options: str) -> Path:
    """A corpus of the forms above, byte by byte."""
    rows = [record for record, _ in FORMS.values()]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data", "prepare", str(folder / "pairs"), "--preference", "--input", str(folder / "in.jsonl"),
                 "--tokenizer", "byte", "--chat-template", "plain", "--workers", "1", *options]) == 0
    return folder / "pairs"


def test_what_counts_is_the_answer_after_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Decoded again: not the earlier answer of several turns, which both conversations have."""
    corpus, tokenizer = IndexedDataset(prepared(tmp_path)), get_tokenizer("byte")
    assert corpus.num_documents == 2 * len(FORMS) and corpus.meta is not None and corpus.meta.pairs == len(FORMS)
    for i in range(corpus.num_documents):
        mask = corpus.read_mask(corpus.document_start(i), len(corpus.document(i)))
        assert mask is not None
        answer = tokenizer.decode(corpus.document(i)[mask].tolist())
        assert answer.strip().removesuffix("<|endoftext|>").strip() == ("good", "bad one")[i % 2]
    sizes = [len(corpus.document(2 * k)) + len(corpus.document(2 * k + 1)) for k in range(len(FORMS))]
    most = sorted(sizes)[-2]
    prepared(tmp_path, "--longest-pair", str(most), "--bad-input", "skip")
    assert IndexedDataset(tmp_path / "pairs").meta.pairs == sum(size <= most for size in sizes)  # type: ignore[union-attr]
    assert f"the two have {max(sizes)} tokens together" in capsys.readouterr().out


def test_the_shipped_preferences_are_what_the_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    made = list(runpy.run_path(str(EXAMPLES / "make_preferences.py"))["preferences"]())
    assert [json.loads(line) for line in (EXAMPLES / "preferences.jsonl").read_text().splitlines()] == made
    assert len({json.dumps(preference_of(record).chosen) for record in made}) == len(made) == 60


def run_of(folder: Path, prefix: Path, *, loss: str = "dpo", seq: int = 160, **training: Any) -> RunConfig:
    """Two pairs to train on and four to evaluate, in fp64."""
    config = RunConfig(
        engine="native", model=replace(HFFolder(folder).model, seq_length=seq), batch=BatchConfig(
            micro_batch_size=2, global_batch_size=2), training=TrainingConfig(loss=loss, dpo_beta=0.3, **training),
        data=DataConfig(synthetic=False, train=(str(prefix),), attention_documents="within", position_reset=True,
                        split=(0.3, 0.7, 0.0)),
    )
    return replace(config, precision=replace(config.precision, dtype="fp64"))


def loaders_of(config: RunConfig) -> Loaders:
    return build_loaders(config, dp_rank=0, dp_size=1, need_tokens=True, need_labels=True)


def log_probability(model: Any, corpus: IndexedDataset, document: int) -> torch.Tensor:
    """Of an answer by transformers' model, its conversation alone: plain torch, token by token."""
    ids = torch.from_numpy(corpus.document(document))[None]
    mask = corpus.read_mask(corpus.document_start(document), ids.shape[1])
    assert mask is not None
    scores = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
    total: torch.Tensor = scores[torch.arange(ids.shape[1] - 1), ids[0, 1:]][torch.from_numpy(mask)[1:]].sum()
    return total


def test_loss_gradient_and_rewards_are_plain_torchs(tmp_path: Path) -> None:
    """In fp64, with a reference that is another model than the one trained: the paper's formula over conversations that
    transformers' GPT-2 reads one by one."""
    pytest.importorskip("transformers")
    prefix, models = prepared(tmp_path), []
    for seed in (0, 1):
        models.append(hf.reference(hf.gpt2(160, vocab_size=257, n_layer=2), seed=seed))
        hf.saved(models[-1], tmp_path / f"model{seed}")
        models[-1].double()
    wide = ("--set", "precision.dtype=fp64")
    assert main(["evaluate", str(tmp_path / "model1"), "--reference", str(prefix), *wide]) == 0
    corpus = IndexedDataset(prefix)
    with torch.no_grad():
        theirs = torch.stack([log_probability(models[1], corpus, i) for i in range(corpus.num_documents)]).numpy()
    np.testing.assert_allclose(read_reference(corpus).sums, theirs, rtol=1e-12)
    assert any("xxh3-128" in line and "model1" in line for line in verify(prefix).checked)

    config = run_of(tmp_path / "model0", prefix)
    assert not problems(config)
    folder = HFFolder(tmp_path / "model0")
    engine = build_engine(config, ParallelContext.single(), torch_providers(), initialise=False)
    engine.load_weights(folder.read)
    assert isinstance(engine, NativeEngine)
    found: dict[str, torch.Tensor] = {}
    engine.on_gradients = lambda grads: found.update({r.name: r.local_view(g).clone() for r, g in grads})
    loaders = loaders_of(config)
    evaluation = [engine.eval_step(step) for step in loaders.eval_batches("valid", 9, 3)]
    result = engine.train_step(loaders.train.step(0, 2), step=0, lr=0.0)

    terms, rewards = [], []
    for k in range(len(FORMS)):
        chosen, rejected = (log_probability(models[0], corpus, 2 * k + i) - theirs[2 * k + i] for i in (0, 1))
        terms.append(torch.log(1 + torch.exp(0.3 * (rejected - chosen))))
        rewards.append((0.3 * chosen.item(), 0.3 * (chosen - rejected).item(), float(chosen > rejected)))
    train = range(2)  # the split cuts at the document nearest to the share, and keeps pairs together
    mean = torch.stack([terms[k] for k in train]).mean()
    mean.backward()
    assert result.loss == pytest.approx(mean.item(), rel=1e-12) and result.tokens == 2
    means = PairObjective(config).metrics(result.auxiliary, result.tokens)
    assert list(means.values()) == pytest.approx(np.mean([rewards[k] for k in train], axis=0).tolist(), rel=1e-6)
    exact = hf.in_our_names(folder.model, "gpt2", {n: p.grad for n, p in models[0].named_parameters()})
    assert gradient_deviation(exact, found, folder.model)[0][0] <= 1e-11
    # Four pairs in batches of three and micro-batches of two: what fills up is no pair.
    assert [e.tokens for e in evaluation] == [3, 1]
    wanted = sum(terms[k].item() for k in range(2, 6))
    assert sum(e.loss_sum for e in evaluation) == pytest.approx(wanted, rel=1e-12)


def test_rewards_of_pairs_are_the_papers() -> None:
    """In numbers, beta and padding among them: a pair whose answers are equally likely is not decided, and a sample
    without an answer is no pair (arXiv 2305.18290, equation 7)."""
    losses = torch.tensor([[1.0, 2.0, 4.0, 8.0], [1.0, 1.0, 1.0, 1.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    sums: dict[str, float] = {}
    context: Any = SimpleNamespace(
        document_starts=torch.tensor([[0, 0, 2, 2]] * 3),
        side={"reference": torch.tensor([[-4.0, -6.0], [-2.0, -2.0], [0.0, 0.0]])},
        add_auxiliary=lambda name, value: sums.__setitem__(name, float(value)),
    )
    found = pair_loss_sum(losses, mask, context, 0.5)
    margin = 0.5 * ((-3.0 + 4.0) - (-8.0 + 6.0))
    assert float(found) == pytest.approx(math.log1p(math.exp(-margin)) + math.log(2.0), rel=1e-12)
    assert sums == pytest.approx({"chosen_reward": 0.5 * (1.0 + 1.0), "reward_margin": margin, "reward_accuracy": 1.0})


def test_pairs_and_references_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    prefix = prepared(tmp_path)
    hf.saved(hf.reference(hf.gpt2(160, vocab_size=257, n_layer=2)), tmp_path / "model")
    config = run_of(tmp_path / "model", prefix)

    def refused(config: RunConfig, message: str) -> None:
        with pytest.raises(DataError, match=message):
            loaders_of(config)

    refused(config, r"pairs.reference: no such file.*evaluate MODEL --reference")
    refused(run_of(tmp_path / "model", prefix, loss="cross_entropy"), "holds 6 pairs .* would learn the rejected ones")
    assert main(["evaluate", str(tmp_path / "model"), "--reference", str(prefix)]) == 0
    assert loaders_of(config).data_fingerprint[0]["reference"] == read_reference(IndexedDataset(prefix)).header.xxh3
    refused(replace(config, model=replace(config.model, seq_length=60)), "pair 4 has .* tokens in its two")
    good = reference_path(prefix).read_bytes()
    reference_path(prefix).write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
    refused(config, "expected 96 with")
    with pytest.raises(DataError, match="the log-probabilities of this corpus"):
        verify(prefix).raise_if_bad()
    reference_path(prefix).write_bytes(good.partition(b"\n")[2])
    refused(config, "pairs.reference: not readable")
    reference_path(prefix).write_bytes(good)
    prepared(tmp_path, "--longest-pair", "60", "--bad-input", "skip")
    refused(config, "is of other tokens than the corpus beside it")
    (tmp_path / "text.txt").write_text("words " * 200)
    text = tmp_path / "text"
    assert main(["data", "prepare", str(text), "--input", f"{text}.txt", "--workers", "1"]) == 0
    refused(run_of(tmp_path / "model", text), 'training.loss "dpo" takes pairs of answers')


def test_what_contradicts_a_loss_of_pairs_is_refused() -> None:
    found = problems(RunConfig(
        engine="deepspeed", training=TrainingConfig(loss="dpo"),
        data=DataConfig(synthetic=True, order="megatron", mask_eod_loss=True)
    ))
    for word in ('engine "deepspeed"', "see the chosen one", "position_reset = true", "order 'stateless'", "no pairs",
                 "mask_eod_loss"):
        assert any(problem.startswith('training.loss "dpo" with') and word in problem for problem in found), word


RUN = """
extends = "{base}/imported/model.toml"
output_dir = "{base}/runs"
name = "dpo"
engine = "native"
model.seq_length = 256
[batch]
micro_batch_size = 4
global_batch_size = 12
[optimizer]
lr = 1e-2
warmup_steps = 2
[precision]
dtype = "fp32"
[data]
train = ["{base}/pairs"]
attention_documents = "within"
split = [0.8, 0.2, 0.0]
[training]
loss = "dpo"
steps = 8
eval_batches = 1
[fine_tuning]
method = "lora"
[checkpoint]
initial_weights = "{base}/model"
"""


def test_the_shipped_preferences_are_learned_from_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the commands of docs/preferences.md, with adapters on a random Llama: nothing is preferred before the first
    update, the chosen answers are after a few, also those that were held out; a plain evaluation of the run works."""
    pytest.importorskip("transformers")
    hf.saved(hf.reference(hf.llama(256, vocab_size=257), scale=1.0), tmp_path / "model")
    (tmp_path / "dpo.toml").write_text(RUN.format(base=tmp_path))
    pairs, model = str(tmp_path / "pairs"), str(tmp_path / "model")
    for words in (
        ("checkpoint", "import", model, str(tmp_path / "imported")),
        ("data", "prepare", pairs, "--preference", "--input", str(EXAMPLES / "preferences.jsonl"), "--tokenizer",
         "byte", "--chat-template", "plain", "--workers", "1"),
        ("evaluate", model, "--reference", pairs),
        ("train", str(tmp_path / "dpo.toml")),
        ("evaluate", str(tmp_path / "runs/dpo"), "--text", str(EXAMPLES / "make_chat.py"), "--max-tokens", "257",
         "--set", "data.tokenizer=byte"),
    ):
        assert main(list(words)) == 0, words
    assert "note: the reference" not in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "runs/dpo/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "learning_rate" in row]
    assert steps[0]["loss"] == pytest.approx(np.log(2), abs=1e-4) and abs(steps[0]["reward_margin"]) < 1e-3
    assert steps[-1]["reward_accuracy"] >= 0.9 > steps[0]["reward_accuracy"]
    before, after = (row["validation_loss"] for row in rows if "validation_loss" in row)
    assert before == pytest.approx(np.log(2), abs=1e-4) and after < 0.5
