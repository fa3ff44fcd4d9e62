"""An exported folder holds the tokenizer that was trained with, by its hash; no other is written, and none silently."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interop_cases import GPT2, LLAMA, random_state

from megatron_port.cli.main import main
from megatron_port.core.checkpoint.format import SavedState
from megatron_port.core.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.core.checkpoint.writer import save_checkpoint
from megatron_port.core.config.dump import as_dict
from megatron_port.core.config.schema import LayoutConfig, ModelConfig, RunConfig
from megatron_port.core.data.indexed import IndexedDataset, data_fingerprint, read_meta, tokenizer_name
from megatron_port.core.errors import DataError
from megatron_port.core.model.shapes import parameter_shapes
from megatron_port.ext.corpora.chat_tokens import chat_recipe
from megatron_port.ext.corpora.hf_tokenizer import write_tokenizer
from megatron_port.ext.corpora.pinned import PROBES, pinned_file, trained_with
from megatron_port.ext.corpora.prepare import prepare
from megatron_port.ext.corpora.tokenizer import get_tokenizer, identity
from megatron_port.ext.corpora.train_tokenizer import train_bpe
from megatron_port.tools.interop.dcp import whole

pytest.importorskip("tokenizers")
MODEL = replace(GPT2, vocab_size=300)
TEXTS = ("the cat and the other cat, the theatre", "def main(): return {'x': 1}")


def bpe(folder: Path, which: int) -> Path:
    """One of two tokenizers of as many ids: the same id means other text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "in.txt").write_text((TEXTS[which] + "\n") * 200 + "".join(map(chr, range(32, 127))))
    train_bpe([folder / "in.txt"], folder / "tokenizer.json", vocab_size=280)
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Contents of both."""
    folder = tmp_path_factory.mktemp("bpe")
    return bpe(folder / "a", 0).read_bytes(), bpe(folder / "b", 1).read_bytes()


def checkpoint_of(
    folder: Path, extra: str, tokenizer: dict[str, Any], corpora: list[dict[str, Any]], model: ModelConfig = MODEL
) -> Checkpoint:
    """A checkpoint of random weights that records such a tokenizer, as the training loop does."""
    state = SavedState(
        step=3, samples=6, tokens=96, layout=LayoutConfig(), config=as_dict(RunConfig(model=model)),
        scalars={"optimizer_steps": 3}, extra={"skipped_total": 0, "tokenizer": extra}, tokenizer=tokenizer,
        data={"corpora": corpora},
    )
    pieces = [whole(n, k, tuple(t.shape), t) for (n, k), t in random_state(model, ("weight",)).items()]
    return open_checkpoint(save_checkpoint(folder, state, pieces, expected=parameter_shapes(model)))


def trained(folder: Path, content: bytes, *, eod: bool = True) -> Checkpoint:
    """A corpus made with that tokenizer.json, and a checkpoint that was trained on it. The original is gone."""
    source = folder / "source"
    source.mkdir(parents=True)
    (source / "tokenizer.json").write_bytes(content)
    (source / "in.txt").write_text("some text of the cat\n" * 50)
    prefix = folder / "data" / "mine"
    prefix.parent.mkdir()
    prepare([source / "in.txt"], prefix, tokenizer=get_tokenizer(f"hf:{source}"), append_eod=eod)
    for file in source.iterdir():
        file.unlink()
    meta = read_meta(prefix)
    assert meta is not None and meta.tokenizer_hash
    known = {"name": meta.tokenizer, "vocab_size": meta.vocab_size, "eod_id": meta.eod_id, "hash": meta.tokenizer_hash}
    return checkpoint_of(folder / "ck", tokenizer_name(prefix, meta), known, data_fingerprint([IndexedDataset(prefix)]))


def written(tmp_path: Path, checkpoint: Checkpoint, **more: Any) -> tuple[Path, str, list[str]]:
    part = tmp_path / "part"
    part.mkdir()
    notes: list[str] = []
    return part, write_tokenizer(part, checkpoint, note=notes.append, **more), notes


def test_the_pinned_file_is_exported_and_not_its_neighbour(tmp_path: Path, two: tuple[bytes, bytes]) -> None:
    """data/tokenizer.json, a tokenizer of another corpus, was what the export took; without it, it took none."""
    checkpoint = trained(tmp_path, two[0])
    (tmp_path / "data" / "tokenizer.json").write_bytes(two[1])
    part, says, notes = written(tmp_path, checkpoint)
    assert (part / "tokenizer.json").read_bytes() == two[0] and not notes
    assert trained_with(checkpoint).hash[:12] in says
    settings = json.loads((part / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|endoftext|>" == trained_with(checkpoint).piece


def test_without_a_neighbour_too(tmp_path: Path, two: tuple[bytes, bytes]) -> None:
    part, _, _ = written(tmp_path, trained(tmp_path, two[0]))
    assert (part / "tokenizer.json").read_bytes() == two[0]


def test_documents_without_an_end_have_a_hash_all_the_same(tmp_path: Path, two: tuple[bytes, bytes]) -> None:
    checkpoint = trained(tmp_path, two[0], eod=False)
    assert trained_with(checkpoint).eod_id == -1
    assert (written(tmp_path, checkpoint)[0] / "tokenizer.json").read_bytes() == two[0]
    pinned_file(trained_with(checkpoint)).write_bytes(two[1])
    with pytest.raises(DataError, match="its ids mean other text"):
        pinned_file(trained_with(checkpoint))


@pytest.mark.parametrize("what", ["exchanged", "gone", "edited"])
def test_a_file_that_is_not_the_pinned_one_is_refused(what: str, tmp_path: Path, two: tuple[bytes, bytes]) -> None:
    checkpoint = trained(tmp_path, two[0])
    file = tmp_path / "data" / "mine.tokenizer.json"
    (tmp_path / "data" / "tokenizer.json").write_bytes(two[1])
    file.unlink() if what == "gone" else file.write_bytes(two[1] if what == "exchanged" else two[0] + b" ")
    with pytest.raises(DataError) as caught:
        written(tmp_path, checkpoint)
    words = ["is not there: no " + str(file)] if what == "gone" else [f"{file} has hash", trained_with(checkpoint).hash]
    for word in (*words, "--tokenizer DIR", "--no-tokenizer"):
        assert word in str(caught.value)
    assert not list((tmp_path / "part").iterdir())


def test_a_corpus_that_moved_is_found_by_its_prefix(
    tmp_path: Path, two: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded path is absolute; a prefix may be relative to the folder in which one works."""
    checkpoint = trained(tmp_path / "old", two[0])
    (tmp_path / "old" / "data").rename(tmp_path / "data")
    state = checkpoint.manifest.state
    state.data["corpora"][0]["prefix"] = "data/mine"  # type: ignore[index]
    monkeypatch.chdir(tmp_path)
    assert (written(tmp_path, checkpoint)[0] / "tokenizer.json").read_bytes() == two[0]


def test_a_folder_that_is_named_must_hold_the_same(tmp_path: Path, two: tuple[bytes, bytes]) -> None:
    checkpoint = trained(tmp_path, two[0])
    for name, content in (("same", two[0]), ("other", two[1]), ("again", json.dumps(json.loads(two[0])).encode())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_bytes(content)
    (tmp_path / "same" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "x": 1}')
    (tmp_path / "empty").mkdir()
    part, says, _ = written(tmp_path, checkpoint, asked=tmp_path / "same")
    assert "by its hash" in says and json.loads((part / "tokenizer_config.json").read_text())["x"] == 1
    for name in ("other", "empty"):
        with pytest.raises(DataError, match="another tokenizer" if name == "other" else "no tokenizer.json"):
            write_tokenizer(part, checkpoint, asked=tmp_path / name)
    assert "pieces, merges and ids equal" in write_tokenizer(part, checkpoint, asked=tmp_path / "again")
    (tmp_path / "data" / "mine.tokenizer.json").unlink()  # nothing to compare with, but the hash
    assert "by its hash" in write_tokenizer(part, checkpoint, asked=tmp_path / "same")
    with pytest.raises(DataError, match="file not there"):
        write_tokenizer(part, checkpoint, asked=tmp_path / "again")


def swapped(body: dict[str, Any]) -> None:
    table = body["model"]["vocab"]
    one, other = [p for p, i in table.items() if i in (65, 66)]
    table[one], table[other] = table[other], table[one]


def without_a_merge(body: dict[str, Any]) -> None:
    if body["model"]["merges"]:
        body["model"]["merges"].pop()
    else:
        body["model"]["merges"].append("A B")
        body["model"]["vocab"]["AB"] = 300


def other_split(body: dict[str, Any]) -> None:
    body["normalizer"] = {"type": "Lowercase"}


@pytest.mark.parametrize(
    ("name", "change"),
    [("byte", None), ("byte", swapped), ("byte", without_a_merge), ("byte", other_split), ("gpt2", None),
     ("gpt2", without_a_merge)],
)
def test_our_own_tokenizers_in_a_folder_are_compared(
    name: str, change: Callable[[dict[str, Any]], None] | None, tmp_path: Path
) -> None:
    from megatron_port.ext.corpora import hf_tokenizer

    try:
        known = identity(name)
        body = hf_tokenizer._byte_json() if name == "byte" else hf_tokenizer._gpt2_json()
        get_tokenizer(name)
    except DataError as error:
        pytest.skip(str(error))
    checkpoint = checkpoint_of(tmp_path / "ck", name, known, [])
    if change:
        change(body)
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "tokenizer.json").write_text(json.dumps(body))
    if change is None:
        assert "ids equal" in written(tmp_path, checkpoint, asked=tmp_path / "dir")[1]
    else:
        with pytest.raises(DataError, match="another tokenizer than"):
            written(tmp_path, checkpoint, asked=tmp_path / "dir")


def test_a_checkpoint_that_records_none_is_not_silent(tmp_path: Path, two: tuple[bytes, bytes]) -> None:
    checkpoint = checkpoint_of(tmp_path / "ck", "", {}, [])
    part, says, notes = written(tmp_path, checkpoint)
    assert says == "none in this folder" and not list(part.iterdir())
    assert len(notes) == 1 and "--tokenizer DIR adds it" in notes[0]
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "tokenizer.json").write_bytes(two[0])
    assert "as they were imported" in write_tokenizer(part, checkpoint, kept=tmp_path / "kept", note=notes.append)
    assert len(notes) == 1 and (part / "tokenizer.json").read_bytes() == two[0]
    assert "not compared" in write_tokenizer(part, checkpoint, asked=tmp_path / "kept", note=notes.append)
    assert len(notes) == 2


def test_a_tokenizer_without_a_file_is_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path / "ck", "tiktoken:cl100k_base", {"hash": "00", "eod_id": 5}, [])
    with pytest.raises(DataError, match="no file in Hugging Face's form"):
        written(tmp_path, checkpoint)


def test_sentencepiece_s_own_file_is_exported(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "in.txt").write_text("the cat and the other cat, the theatre: a, b, c.\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "in.txt"), model_prefix=str(tmp_path / "sp"), vocab_size=40, model_type="bpe",
        minloglevel=2)
    (tmp_path / "data").mkdir()
    prefix = tmp_path / "data" / "mine"
    prepare([tmp_path / "in.txt"], prefix, tokenizer=get_tokenizer(f"sentencepiece:{tmp_path / 'sp.model'}"))
    meta = read_meta(prefix)
    assert meta is not None
    known = {"name": meta.tokenizer, "eod_id": meta.eod_id, "hash": meta.tokenizer_hash}
    checkpoint = checkpoint_of(tmp_path / "ck", tokenizer_name(prefix, meta), known, [])
    part, says, _ = written(tmp_path, checkpoint)
    assert (part / "tokenizer.model").read_bytes() == (tmp_path / "sp.model").read_bytes() and "SentencePiece" in says
    (tmp_path / "data" / "mine.tokenizer.model").write_bytes((tmp_path / "sp.model").read_bytes() + b"\0")
    with pytest.raises(DataError, match="its ids mean other text"):
        write_tokenizer(part, checkpoint)


def test_generation_and_evaluation_take_the_pinned_file_too(
    tmp_path: Path, two: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_port.run.weights import open_weights

    step = trained(tmp_path / "old", two[0]).path
    weights = open_weights(step)
    assert weights.tokenizer().encode("theatre") == get_tokenizer(weights.tokenizer_name).encode("theatre")
    other = tmp_path / "other.json"
    other.write_bytes(two[1])
    (tmp_path / "old" / "data" / "mine.tokenizer.json").write_bytes(two[1])
    with pytest.raises(DataError, match="its ids mean other text.*--set data.tokenizer=hf:FILE"):
        weights.tokenizer()
    assert weights.tokenizer(f"hf:{other}").encode("theatre")


def test_the_command(tmp_path: Path, two: tuple[bytes, bytes], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    step = trained(tmp_path, two[0]).path
    export = ["checkpoint", "export", str(step), "--to", "hf"]
    assert main([*export, str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == two[0]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "that the corpus was made with (hash " in card and "`AutoTokenizer` gives the ids of training" in card
    (tmp_path / "data" / "mine.tokenizer.json").write_bytes(two[1])
    capsys.readouterr()
    assert main([*export, str(tmp_path / "bad")]) == 4 and not (tmp_path / "bad").exists()
    assert "its ids mean other text" in capsys.readouterr().err
    assert main([*export, str(tmp_path / "bare"), "--no-tokenizer", "--skip-check"]) == 0
    assert not list((tmp_path / "bare").glob("*token*")) and "left out" in (tmp_path / "bare/README.md").read_text()
    assert main([*export, str(tmp_path / "x"), "--no-tokenizer", "--tokenizer", str(tmp_path)]) == 5


def model_of_kind(kind: str, folder: Path) -> tuple[str, ModelConfig]:
    """A tokenizer's name, and a model with as many entries and room for 200 tokens."""
    (folder / "in.txt").write_text("the cat and the other cat, the theatre: a, b, c.\n" * 50)
    if kind == "sentencepiece":
        sentencepiece = pytest.importorskip("sentencepiece")
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "in.txt"), model_prefix=str(folder / "sp"), vocab_size=280, model_type="bpe",
            byte_fallback=True, hard_vocab_limit=False, minloglevel=2)
        return f"sentencepiece:{folder / 'sp.model'}", replace(LLAMA, vocab_size=280, seq_length=256)
    name = f"hf:{bpe(folder / 'bpe', 0)}" if kind == "hf" else kind
    sizes = {"byte": 257, "gpt2": 50257, "hf": 280}
    return name, replace(GPT2, vocab_size=sizes[kind], seq_length=256)


@pytest.mark.parametrize("kind", ["byte", pytest.param("gpt2", marks=pytest.mark.slow), "hf", "sentencepiece"])
def test_a_text_is_continued_as_by_transformers(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a text to 200 greedy tokens, by our checkpoint and its pinned tokenizer, by our reading of the exported
    folder, and by transformers."""
    transformers = pytest.importorskip("transformers")
    try:
        name, model = model_of_kind(kind, tmp_path)
        prepare([tmp_path / "in.txt"], tmp_path / "data" / "mine", tokenizer=get_tokenizer(name))
    except DataError as error:
        pytest.skip(str(error))
    meta = read_meta(tmp_path / "data" / "mine")
    assert meta is not None and meta.vocab_size <= model.vocab_size
    known = {"name": meta.tokenizer, "vocab_size": meta.vocab_size, "eod_id": meta.eod_id, "hash": meta.tokenizer_hash}
    corpora = data_fingerprint([IndexedDataset(tmp_path / "data" / "mine")])
    step = checkpoint_of(tmp_path / "ck", tokenizer_name(tmp_path / "data" / "mine", meta), known, corpora, model).path
    unchecked = [] if kind == "hf" else ["--skip-check"]
    assert main(["checkpoint", "export", str(step), str(tmp_path / "out"), "--to", "hf", *unchecked]) == 0
    capsys.readouterr()
    prompt = "the other cat and the theatre"
    ask = ["generate", "--prompt", prompt, "--temperature", "0", "--tokens", "200", "--json"]
    for source in (step, tmp_path / "out"):
        assert main([*ask, str(source)]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines()[-2:])
    assert first == second and len(first["tokens"]) == 200
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"), local_files_only=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"), local_files_only=True)
    ids = torch.tensor([get_tokenizer(name).encode(prompt)])
    if kind != "sentencepiece":  # whose model transformers converts to something with other ids: the card says so
        assert tokenizer.eos_token_id == meta.eod_id
        for text in (prompt, *PROBES):
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == get_tokenizer(name).encode(text)
    made = theirs.generate(ids, max_new_tokens=200, do_sample=False, pad_token_id=0)
    assert made[0, ids.shape[1]:].tolist() == first["tokens"]


CHAT = ("{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": " theatre"}]


def trained_on_chat(folder: Path, content: bytes) -> Checkpoint:
    """A corpus of conversations by a folder's own template, and a checkpoint that was trained on it. The folder is
    gone."""
    tokenizers = pytest.importorskip("tokenizers")
    source = folder / "source"
    source.mkdir(parents=True)
    made = tokenizers.Tokenizer.from_buffer(content)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(source / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>", "chat_template": CHAT}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "in.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 9)
    prefix = folder / "data" / "chat"
    tokenizer = get_tokenizer(f"hf:{source}")
    prepare([folder / "in.jsonl"], prefix, tokenizer=tokenizer, chat=chat_recipe(tokenizer))
    source.rename(folder / "hidden")
    meta = read_meta(prefix)
    assert meta is not None
    known = {"name": meta.tokenizer, "vocab_size": meta.vocab_size, "eod_id": meta.eod_id, "hash": meta.tokenizer_hash}
    return checkpoint_of(folder / "ck", tokenizer_name(prefix, meta), known, data_fingerprint([IndexedDataset(prefix)]))


def test_the_chat_template_travels(
    tmp_path: Path, two: tuple[bytes, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """From the corpus into the folder: template, its pieces, and the id that ends an answer; transformers gives the ids
    of the corpus, and the settings of the model that was trained further stay."""
    transformers = pytest.importorskip("transformers")
    step = trained_on_chat(tmp_path, two[0]).path
    document = IndexedDataset(tmp_path / "data" / "chat").document(0).tolist()

    def exported(name: str) -> Any:
        assert main(["checkpoint", "export", str(step), str(tmp_path / name), "--to", "hf"]) == 0
        theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / name), local_files_only=True)
        ids = theirs.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
        assert [*ids, theirs.eos_token_id] == document and theirs.chat_template == CHAT
        return json.loads((tmp_path / name / "generation_config.json").read_text())

    assert exported("out")["eos_token_id"] == [279, 281]  # the end of text, and <|im_end|>
    assert "by its chat template, on a conversation" in (tmp_path / "out" / "README.md").read_text()
    kept = step.parent / "huggingface"
    (tmp_path / "hidden").rename(kept)
    settings = json.loads((kept / "tokenizer_config.json").read_text())
    (kept / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 77, "chat_template": "x"}))
    (kept / "generation_config.json").write_text('{"eos_token_id": 281, "top_k": 7}')
    assert exported("further") == {"eos_token_id": [281, 279], "top_k": 7, "pad_token_id": 279}
    assert json.loads((tmp_path / "further" / "tokenizer_config.json").read_text())["model_max_length"] == 77
    (kept / "tokenizer.json").write_bytes(two[1])  # of another model: nothing of it is taken
    assert "top_k" not in exported("other")
    capsys.readouterr()
    ask = ["generate", "--prompt", "the cat", "--chat", "--temperature", "0", "--tokens", "8"]
    assert main([*ask, str(step)]) == 0 and main([*ask, str(tmp_path / "out")]) == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first == second and "the cat" not in first
    (tmp_path / "data" / "chat.chat.json").write_text("{}")
    assert main(["checkpoint", "export", str(step), str(tmp_path / "bad"), "--to", "hf"]) == 4
    assert "chat.chat.json is another. Put the old file back" in capsys.readouterr().err


def test_a_model_without_a_template_cannot_chat(tmp_path: Path, two: tuple[bytes, bytes]) -> None:
    from megatron_port.run.weights import open_weights

    weights = open_weights(trained(tmp_path, two[0]).path)
    with pytest.raises(DataError, match="not trained on conversations, and no chat template came with it"):
        weights.chat(weights.tokenizer())


def test_a_run_keeps_the_small_files_of_the_model_it_began_as(tmp_path: Path, two: tuple[bytes, bytes]) -> None:
    """Beside its own checkpoints, from a folder or from a checkpoint that has them; its own resume changes nothing."""
    from types import SimpleNamespace

    from megatron_port.run.weights import carry_companions

    session: Any = SimpleNamespace(
        is_rank_zero=True, config=RunConfig(name="r", output_dir=str(tmp_path)), ctx=SimpleNamespace(coords=()))
    kept = tmp_path / "r" / "checkpoints" / "huggingface"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "hf" / "tokenizer.json").write_bytes(two[0])
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"large")
    carry_companions(tmp_path / "hf", session)
    assert sorted(f.name for f in kept.iterdir()) == ["config.json", "tokenizer.json"]
    carry_companions(kept.parent / "step-00000001", session)
    assert (kept / "tokenizer.json").read_bytes() == two[0]
    (tmp_path / "import" / "huggingface").mkdir(parents=True)
    (tmp_path / "import" / "huggingface" / "generation_config.json").write_text("{}")
    carry_companions(tmp_path / "import" / "step-00000000", session)
    assert [f.name for f in kept.iterdir()] == ["generation_config.json"]
