"""What a tokenizer's own post-processor puts around a text (BOS) is in prompts, scores, corpora and exports: the ids
are those of transformers, and those of lm-eval's own adapter for transformers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bos_cases import LINES, POSTS, sentencepiece_model, tokenizer_json
from interop_cases import LLAMA
from test_hf_tokenizer import checkpoint_of

from megatron_port.cli.main import main
from megatron_port.core.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.data.indexed import IndexedDataset, data_fingerprint, meta_path, read_meta
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.corpus_tokenizer import tokenizer_of
from megatron_port.ext.corpora.hf_tokenizer import write_tokenizer
from megatron_port.ext.corpora.tokenizer import encode_whole, get_tokenizer
from megatron_port.run.document_starts import check_document_starts
from megatron_port.run.weights import open_weights
from megatron_port.tools.inference.generation import text_after
from megatron_port.tools.inference.scoring import Questions

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
TEXTS = ("the cat and the other", "", " cat", "two  blanks, naïve 東", "<s> the </s>")
PROMPTS = ("the cat and", "a")


def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def made(folder: Path, kind: str, post: str, **settings: Any) -> Path:
    if kind == "sentencepiece":
        pytest.importorskip("sentencepiece")
        return sentencepiece_model(folder, add_bos_token=post in ("bos", "both"), add_eos_token=post == "both",
                                   **settings)
    return tokenizer_json(folder, kind, post, **settings)


def name_of(folder: Path) -> str:
    """A tokenizer's name for ``--tokenizer``."""
    file = folder / "tokenizer.model"
    return f"sentencepiece:{file}" if file.is_file() else f"hf:{folder}"


@pytest.mark.parametrize("kind", ["bytes", "blanks", "sentencepiece"])
def test_a_text_has_the_ids_of_transformers(kind: str, tmp_path: Path) -> None:
    """By every post-processor, whatever tokenizer_config.json says of a tokenizer.json."""
    for number, post in enumerate(POSTS if kind != "sentencepiece" else ("none", "bos", "both")):
        said = {"add_bos_token": number % 2 == 0} if kind != "sentencepiece" else {}
        folder = made(tmp_path / post, kind, post, **said)
        ours, other = get_tokenizer(name_of(folder)), theirs(folder)
        for text in TEXTS[:-1]:
            assert encode_whole(ours, text) == other(text)["input_ids"], (post, text)
            assert ours.encode(text) == other(text, add_special_tokens=False)["input_ids"]
        assert ours.bos_id == other.bos_token_id  # type: ignore[attr-defined]
    for plain in ("byte", "gpt2") if kind == "bytes" else ():
        tokenizer = get_tokenizer(plain)
        assert encode_whole(tokenizer, "the") == tokenizer.encode("the")


@pytest.fixture(scope="module", params=["blanks", "sentencepiece"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that says the words of ``LINES``, with a tokenizer that adds BOS, as transformers saves them."""
    import hf_models as hf

    folder: Path = made(tmp_path_factory.mktemp("model"), request.param, "bos")
    ends = theirs(folder)
    config = hf.llama(64, vocab_size=300, bos_token_id=ends.bos_token_id, eos_token_id=ends.eos_token_id)
    made_model = hf.reference(config)
    words = torch.zeros(300, 1)
    words[ends(LINES[0], add_special_tokens=False)["input_ids"]] = 1.0
    made_model.lm_head.weight.data *= words
    return hf.saved(made_model, folder)


def log_probabilities(folder: Path, ids: list[int]) -> torch.Tensor:
    """Those of each id but the first, by transformers."""
    import hf_models as hf

    with torch.no_grad():
        logits = hf.loaded(folder)(torch.tensor([ids])).logits[0].double()
    return torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_prompts_and_texts_of_a_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``generate`` continues the same ids with the same ids, and prints the same text; a stop text that begins with a
    blank is found; ``evaluate`` predicts the first word from BOS."""
    import hf_models as hf

    tokenizer, other = theirs(model), hf.loaded(model)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            whole = other.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
        ask = ["generate", str(model), "--prompt", prompt, "--temperature", "0", "--tokens", "12", "--json"]
        assert main(ask) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["tokens"] == whole[ids["input_ids"].shape[1]:]
        text = tokenizer.decode(whole, skip_special_tokens=True)
        assert prompt + found["text"] == text and len(found["text"]) > 4
        stop = found["text"][:3]
        assert main([*ask, "--stop", stop]) == 0
        stopped = json.loads(capsys.readouterr().out)
        assert stopped["text"] == "" and stopped["stopped"] and len(stopped["tokens"]) <= 3
    (tmp_path / "text").write_text(LINES[0])
    assert main(["evaluate", str(model), "--text", str(tmp_path / "text"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ids = tokenizer(LINES[0])["input_ids"]
    assert found["tokens"] == len(ids) - 1
    assert found["loss"] == pytest.approx(-float(log_probabilities(model, ids).mean()), abs=1e-5)


def test_the_blank_before_a_word_and_bytes_of_a_character() -> None:
    """A decoder that drops the first blank, and one in which a byte changes the characters before it."""
    words = {1: "▁the", 2: "▁cat", 3: "s"}

    def blanks(ids: Any) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert text_after(blanks, [1], [2, 3]) == " cats" and text_after(blanks, [1], [3]) == "s"
    assert text_after(blanks, [], [2]) == "cat"

    def fallback(ids: Any) -> str:
        return bytes(ids).decode("utf-8", errors="replace") if max(ids) < 0x100 else "?"

    assert text_after(fallback, [0xC3], [0xA9]) == fallback([0xA9])


def harness(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], int]:
    """(ids, how many are the continuation's), as lm-eval 0.4.13's ``hf`` model encodes a pair."""
    if not context:
        prefix, ids = tokenizer.bos_token_id, tokenizer.encode(continuation, add_special_tokens=False)
        return ([prefix, *ids], len(ids)) if ids[0] != prefix else (ids, len(ids) - 1)
    blanks = len(context) - len(context.rstrip())
    whole = tokenizer.encode(context + continuation)
    return whole, len(whole) - len(tokenizer.encode(context[: len(context) - blanks]))


@pytest.mark.parametrize(("kind", "post"), [("bytes", "none"), ("bytes", "bos"), ("blanks", "bos"), ("blanks", "both"),
                                            ("sentencepiece", "bos")])
def test_questions_are_encoded_as_by_the_harness(kind: str, post: str, tmp_path: Path) -> None:
    folder = made(tmp_path, kind, post)
    other = theirs(folder)
    untrained: Any = type("Untrained", (), {"model": ModelConfig(seq_length=20)})()
    asked = Questions(untrained, get_tokenizer(name_of(folder)))
    for context, continuation in (("the cat", " and"), ("the cat ", "and"), ("", "the other"), ("", " cat")):
        assert asked.pair(context, continuation) == harness(other, context, continuation)
    ids = other.encode("the cat and the other cat")[:20]
    assert asked.windows("the cat and the other cat")[0] == ([other.bos_token_id, *ids], len(ids))  # BOS twice


def prepared(folder: Path, tokenizer: Path, *options: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "in.txt").write_text(LINES[0])
    assert main(["data", "prepare", str(folder / "c"), "--input", str(folder / "in.txt"), "--tokenizer",
                 name_of(tokenizer), "--workers", "1", *options]) == 0
    return folder / "c"


@pytest.mark.parametrize(("kind", "post"), [("bytes", "bos"), ("blanks", "both"), ("sentencepiece", "bos"),
                                            ("sentencepiece", "both"), ("bytes", "none")])
def test_documents_begin_as_the_tokenizer_says(
    kind: str, post: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They end with one end of document, by the post-processor or by ``prepare``; the sidecar records the beginning."""
    folder = made(tmp_path / "t", kind, post)
    other = theirs(folder)
    plain, bos, eos = other.encode(LINES[0], add_special_tokens=False), other.bos_token_id, other.eos_token_id
    before = [bos] if post != "none" else []
    for options, ids, said in ((), [*before, *plain, eos], str(bos) if before else "none"), \
            (("--no-eod",), [*before, *plain], str(bos) if before else "none"), \
            (("--no-bos",), [*plain, eos], "omitted" if before else "none"):
        prefix = prepared(tmp_path / "d", folder, *options)
        meta = read_meta(prefix)
        assert IndexedDataset(prefix).document(0).tolist() == ids and meta is not None and meta.bos == said
        assert ("(BOS)" in capsys.readouterr().out) == bool(before)


def test_training_refuses_documents_that_begin_otherwise(tmp_path: Path, model: Path) -> None:
    """In a blend, and against the model that a run starts from; a corpus of before this was kept has no BOS."""
    with_bos, without = prepared(tmp_path / "a", model), prepared(tmp_path / "b", model, "--no-bos")
    corpora = [IndexedDataset(p) for p in (with_bos, without)]
    run = replace(RunConfig(), model=replace(LLAMA, vocab_size=300))
    with pytest.raises(DataError, match=r"do not begin alike: .*\(with \d\), .*\(with no BOS\); prepare"):
        tokenizer_of(run, corpora)
    assert tokenizer_of(run, corpora[:1])[2]["bos"] == str(theirs(model).bos_token_id)
    check_document_starts([str(with_bos), str(without), "s3://bucket/c"], model, None)
    old = json.loads(meta_path(with_bos).read_text())
    meta_path(with_bos).write_text(json.dumps({k: v for k, v in old.items() if k != "bos"}))
    words = r"begin with no BOS \(.*\), and the tokenizer .* with \d; .* into this file"
    with pytest.raises(DataError, match=words) as error:
        check_document_starts([str(with_bos)], model, None)
    asked = json.loads("{" + re.findall(r'"bos": "\w+"', str(error.value))[0] + "}")
    meta_path(with_bos).write_text(json.dumps({**old, **asked}))
    check_document_starts([str(with_bos)], model, None)
    meta_path(with_bos).write_text(json.dumps({**old, "bos": "x"}))
    with pytest.raises(DataError, match="not a readable sidecar"):
        read_meta(with_bos)


def trained(folder: Path, prefix: Path) -> Checkpoint:
    """A checkpoint that was trained on a corpus, as the loop records it."""
    corpus = IndexedDataset(prefix)
    name, _, known = tokenizer_of(replace(RunConfig(), model=replace(LLAMA, vocab_size=300)), [corpus])
    sizes = replace(LLAMA, vocab_size=300, seq_length=64)
    return checkpoint_of(folder, str(name), known, data_fingerprint([corpus]), sizes)


@pytest.mark.parametrize("kind", ["bytes", "blanks", "sentencepiece"])
@pytest.mark.parametrize("options", [(), ("--no-bos",)])
def test_an_export_begins_texts_as_documents_began(
    kind: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run, its export and transformers have the same ids; BOS, padding and a batch work as they are."""
    folder = made(tmp_path / "t", kind, "bos")
    step = trained(tmp_path / "ck", prepared(tmp_path / "d", folder, *options)).path
    other = theirs(folder)
    assert main(["checkpoint", "export", str(step), str(tmp_path / "out"), "--to", "hf"]) == 0
    text = "the cat and"
    wanted = other(text, add_special_tokens=not options)["input_ids"]
    read = theirs(tmp_path / "out")
    assert encode_whole(open_weights(step).tokenizer(), text) == read(text)["input_ids"] == wanted
    assert encode_whole(open_weights(tmp_path / "out").tokenizer(), text) == wanted
    (tmp_path / "part").mkdir()
    write_tokenizer(tmp_path / "part", open_checkpoint(step), asked=folder)  # from the folder that the user names, too
    assert theirs(tmp_path / "part")(text)["input_ids"] == wanted
    for name in ("config.json", "generation_config.json"):
        body = json.loads((tmp_path / "out" / name).read_text())
        assert (body["bos_token_id"], body["eos_token_id"]) == (other.bos_token_id, other.eos_token_id)
    batch = read(["the cat", "the cat and the other"], padding=True, return_tensors="pt")
    theirs_model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"), local_files_only=True)
    both = theirs_model.generate(**batch, max_new_tokens=5, do_sample=False)
    alone = theirs_model.generate(**read(["the cat"], return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert both[0, -5:].tolist() == alone[0, -5:].tolist() and theirs_model.generation_config.pad_token_id is not None
