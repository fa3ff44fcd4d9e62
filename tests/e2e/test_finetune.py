"""Fine-tuning on conversations, from a Hugging Face folder to an answer, by the commands of docs/chat.md."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hf_models as hf
import pytest
import torch

from megatron_port.cli.main import main
from megatron_port.core.config.loader import load
from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.core.data.loader import build_loaders
from megatron_port.ext.corpora.source_files import ReadOptions
from megatron_port.ext.corpora.tokenizer import get_tokenizer
from megatron_port.ext.corpora.train_tokenizer import train_bpe
from megatron_port.run.weights import Weights

if TYPE_CHECKING:
    from commands import Commands

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
ROOT = Path(__file__).resolve().parents[2]
STEPS = 40
RUN = """
extends = "{base}/imported/model.toml"
output_dir = "{base}/runs"
name = "chat"
engine = "native"
[layout]
tensor_parallel_size = 2
pipeline_parallel_size = 2
data_parallel_size = 2
[batch]
micro_batch_size = 2
global_batch_size = 8
[precision]
dtype = "fp32"
[optimizer]
lr = 1e-2
decay_steps = 40
warmup_steps = 3
[data]
train = ["{base}/data/chat"]
[training]
steps = {steps}
eval_batches = 0
[checkpoint]
initial_weights = "{base}/imported"
"""


def base_model(folder: Path) -> list[int]:
    """A random Llama with a tokenizer of its own, special pieces for turns, and generation settings; the ids that end a
    text and a turn."""
    (folder / "in.txt").write_text((ROOT / "examples/chat/chat.jsonl").read_text())
    hf.saved(hf.reference(hf.llama(256, vocab_size=400), scale=1.0), folder / "base")
    train_bpe([folder / "in.txt"], folder / "base" / "tokenizer.json", vocab_size=398,
              options=ReadOptions(format="text"))  # braces and quotes are pieces, too
    made = tokenizers.Tokenizer.from_file(str(folder / "base" / "tokenizer.json"))
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "base" / "tokenizer.json"))
    (folder / "base" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "model_max_length": 256}')
    ends = [made.token_to_id(piece) for piece in ("<|endoftext|>", "<|im_end|>")]
    (folder / "base/generation_config.json").write_text(f'{{"eos_token_id": {ends[0]}, "repetition_penalty": 1.0}}')
    return ends


def their_loss(folder: Path, run_file: Path) -> float:
    """The loss of the first step by transformers: labels that do not count are left out."""
    config = load(str(run_file)).config
    loader = build_loaders(config, dp_rank=0, dp_size=1, need_tokens=True, need_labels=True).train
    model, total, count = hf.loaded(folder), 0.0, 0
    for batch in loader.step(0, config.batch.global_batch_size):
        assert batch.tokens is not None and batch.labels is not None and batch.loss_mask is not None
        labels = torch.where(batch.loss_mask == 1, batch.labels, -100)
        with torch.no_grad():
            logits = model(batch.tokens).logits.flatten(0, 1)
        total += float(torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum"))
        count += int((labels >= 0).sum())
    return total / count


def their_evaluation(folder: Path, corpus: Path) -> tuple[float, int]:
    """(mean loss of the answers, their tokens) by transformers, each conversation by itself."""
    data, model = IndexedDataset(str(corpus)), hf.loaded(folder)
    ids, counts = [], []
    for start, end in itertools.pairwise(data.document_edges(0, data.num_documents).tolist()):
        mask = data.read_mask(start + 1, end - start - 1)
        assert mask is not None
        ids.append(torch.from_numpy(data.read(start, end - start)))
        counts.append(torch.from_numpy(mask))
    with torch.no_grad():  # what is behind a conversation changes none of its logits
        logits = model(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)).logits
    losses = [
        torch.nn.functional.cross_entropy(row[: len(i) - 1], i[1:], reduction="none")[c].double().sum()
        for row, i, c in zip(logits, ids, counts, strict=True)
    ]
    tokens = sum(int(c.sum()) for c in counts)
    return float(sum(losses)) / tokens, tokens


def test_from_a_folder_to_an_answer(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Import, prepare, train at tp 2 × pp 2 × dp 2, export, generate: the first loss is transformers' over the answers,
    the loss falls, and the exported folder answers in transformers, by its own template, with our tokens."""
    ends = base_model(tmp_path)
    run_file = tmp_path / "chat.toml"
    run_file.write_text(RUN.format(base=tmp_path, steps=STEPS))

    def command(*words: Any) -> str:
        code, said = commands.run(*map(str, words), seconds=300)
        assert code == 0, said
        return said

    command("checkpoint", "import", tmp_path / "base", tmp_path / "imported")
    said = command("data", "prepare", tmp_path / "data/chat", "--chat", "--input", ROOT / "examples/chat/chat.jsonl",
                   "--tokenizer", f"hf:{tmp_path / 'base'}", "--chat-template", "chatml", "--workers", 1)
    assert "500 documents" in said and "are the assistant's" in said
    wanted = their_loss(tmp_path / "base", run_file)
    command("train", run_file, "--nproc", 8)
    rows = [json.loads(line) for line in (tmp_path / "runs/chat/metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert losses[1] == pytest.approx(wanted, rel=1e-5)
    assert losses[STEPS] < 0.5 * losses[1], losses
    step = tmp_path / f"runs/chat/checkpoints/step-{STEPS:08d}"
    (tmp_path / "base").rename(tmp_path / "gone")  # everything comes from the run and its corpus
    command("checkpoint", "export", step, tmp_path / "out", "--to", "hf")
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings == {"eos_token_id": ends, "repetition_penalty": 1.0, "pad_token_id": ends[0]}
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"] == 256

    packed = ["data.packing=first_fit", "data.attention_documents=within", f"data.index_cache={tmp_path / 'cache'}"]
    assert main(["evaluate", str(tmp_path / "out"), "--data", str(tmp_path / "data/chat"), "--micro-batch-size", "4",
                 "--json", str(tmp_path / "found.json"), *(word for s in packed for word in ("--set", s))]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    loss, tokens = their_evaluation(tmp_path / "out", tmp_path / "data/chat")
    assert found["tokens"] == tokens and found["loss"] == pytest.approx(loss, rel=1e-5)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"), local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"), local_files_only=True)
    question = "What is the capital of France?"
    ask = ["generate", str(tmp_path / "out"), "--temperature", "0", "--json", "--prompt", question]
    assert main([*ask, "--chat"]) == 0
    # A library that transformers imports late may print before it.
    mine = json.loads(capsys.readouterr().out.splitlines()[-1])
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                           return_tensors="pt", return_dict=True)["input_ids"]
    made = theirs.generate(prompt, max_new_tokens=100, do_sample=False, pad_token_id=0)[0, prompt.shape[1]:].tolist()
    assert mine["stopped"] and made == [*mine["tokens"], ends[1]] and mine["text"] == tokenizer.decode(made[:-1])
    monkeypatch.setattr(Weights, "stop_ids", lambda *_: ())  # 200 tokens, whatever they are
    assert main([*ask, "--tokens", "200"]) == 0
    tokens = json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"]
    assert tokens == continued(theirs, tokenizer(question, add_special_tokens=False)["input_ids"])


def continued(model: Any, prompt: list[int]) -> list[int]:
    """200 greedy tokens of transformers."""
    with torch.no_grad():
        made = model.generate(torch.tensor([prompt]), max_new_tokens=200, min_new_tokens=200, do_sample=False,
                              eos_token_id=None, pad_token_id=0)
    found: list[int] = made[0, len(prompt):].tolist()
    assert len(found) == 200
    return found


def tokenizer_of(kind: str, folder: Path) -> tuple[str, int]:
    """(name, entries) of a tokenizer that is no tokenizer.json."""
    if kind == "sentencepiece":
        sentencepiece = pytest.importorskip("sentencepiece")
        sentencepiece.SentencePieceTrainer.train(
            input=str(ROOT / "examples/chat/chat.jsonl"), model_prefix=str(folder / "sp"), vocab_size=400,
            model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
            remove_extra_whitespaces=False, minloglevel=2)
        return f"sentencepiece:{folder / 'sp.model'}", 400
    return kind, {"byte": 257, "gpt2": 50257}[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte", "gpt2", "sentencepiece"])
def test_each_kind_of_tokenizer(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Import, prepare, train, export, generate: 200 tokens of transformers. (``tiktoken:`` has no file that an export
    could take.)"""
    name, entries = tokenizer_of(kind, tmp_path)
    hf.saved(hf.reference(hf.llama(320, vocab_size=entries, bos_token_id=None, eos_token_id=None)), tmp_path / "base")
    (tmp_path / "chat.toml").write_text(RUN.format(base=tmp_path, steps=10).replace("lr = 1e-2", "lr = 2e-3"))

    def command(*words: Any) -> None:
        code, said = commands.run(*map(str, words), seconds=300)
        assert code == 0, said

    command("checkpoint", "import", tmp_path / "base", tmp_path / "imported")
    command("data", "prepare", tmp_path / "data/chat", "--chat", "--input", ROOT / "examples/chat/chat.jsonl",
            "--tokenizer", name, "--chat-template", "plain", "--workers", 1)
    command("train", tmp_path / "chat.toml", "--nproc", 8)
    command("checkpoint", "export", tmp_path / "runs/chat/checkpoints/step-00000010", tmp_path / "out", "--to", "hf")
    monkeypatch.setattr(Weights, "stop_ids", lambda *_: ())
    question = "What is the capital of France?"
    for source in (tmp_path / "runs/chat", tmp_path / "out"):
        assert main(["generate", str(source), "--temperature", "0", "--json", "--prompt", question,
                     "--tokens", "200"]) == 0
    ours = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    ids = get_tokenizer(name).encode(question)
    assert ours == [continued(hf.loaded(tmp_path / "out"), ids)] * 2
    if kind != "sentencepiece":  # transformers converts its model to something with other ids: the card says so
        theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"), local_files_only=True)
        assert theirs(question, add_special_tokens=False)["input_ids"] == ids
