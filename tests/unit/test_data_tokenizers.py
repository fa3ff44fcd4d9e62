"""Tokenizers of other libraries, training one, and what the sidecar pins of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from megatron_port.core.data.indexed import IndexedDataset, meta_path, read_meta, tokenizer_name
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.prepare import prepare
from megatron_port.ext.corpora.tokenizer import encode_array, get_tokenizer, gpt2_directory, identity, identity_of
from megatron_port.ext.corpora.train_tokenizer import train_bpe

TEXT = "The <|endoftext|> of the </s> thing, the théâtre and 日本語 🎭.\n\n  the the the\n"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "in.txt").write_text("the cat and the other cat, the theatre\n" * 50 + TEXT)
    assert train_bpe([folder / "in.txt"], folder / "tokenizer.json", vocab_size=300) == 300
    return folder / "tokenizer.json"


def test_a_trained_bpe(bpe):
    tokenizer = get_tokenizer(f"hf:{bpe}")
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT and len(ids) < len(TEXT.encode()) and tokenizer.eod_id == 299 not in ids
    assert tokenizer.vocab_size == 300 and tokenizer.decode([*ids[:3], 299]) == tokenizer.decode(ids[:3])
    assert np.array_equal(encode_array(tokenizer, TEXT), ids)
    every = "".join(map(chr, range(1, 0x250)))
    assert tokenizer.decode(tokenizer.encode(every)) == every
    same = [identity_of(t)["hash"] for t in (tokenizer, get_tokenizer(str(bpe)), get_tokenizer(str(bpe.parent)))]
    assert same == [identity(f"hf:{bpe}")["hash"]] * 3


def test_training_faults(tmp_path, bpe):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nx\n')
    with pytest.raises(DataError, match="at least 257"):
        train_bpe([tmp_path], tmp_path / "t.json", vocab_size=256)
    with pytest.raises(DataError, match=r"a\.jsonl:2: not a JSON"):
        train_bpe([tmp_path], tmp_path / "t.json", vocab_size=300)
    assert train_bpe([tmp_path], tmp_path / "t.json", vocab_size=300, bad_input="skip") == 257
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "t.json"]


def test_gpt2_as_a_tokenizer_json_is_gpt2(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    try:
        root = gpt2_directory()
    except DataError as error:
        pytest.skip(str(error))
    made = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(root / "encoder.json"), str(root / "vocab.bpe")))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    made.enable_truncation(4)
    made.enable_padding(length=64)
    made.save(str(tmp_path / "tokenizer.json"))
    ours, theirs = get_tokenizer("gpt2"), get_tokenizer(f"hf:{tmp_path}")
    assert theirs.encode(TEXT) == ours.encode(TEXT) == encode_array(ours, TEXT).tolist()
    assert (theirs.vocab_size, theirs.eod_id) == (50257, 50256)


def test_tiktokens_own_gpt2_from_its_cache(tmp_path, monkeypatch):
    try:
        root = gpt2_directory()
    except DataError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    shutil.copy(root / "encoder.json", tmp_path / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
    shutil.copy(root / "vocab.bpe", tmp_path / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee")
    theirs = get_tokenizer("tiktoken:gpt2", directory=tmp_path)
    assert theirs.encode(TEXT) == get_tokenizer("gpt2").encode(TEXT) and theirs.eod_id == 50256
    assert theirs.decode(theirs.encode(TEXT)) == TEXT and len(identity_of(theirs)["hash"]) == 64
    with pytest.raises(DataError, match="no special piece '<end>'"):
        get_tokenizer("tiktoken:gpt2#<end>", directory=tmp_path)
    with pytest.raises(DataError, match="it has .*cl100k_base"):
        get_tokenizer("tiktoken:word")


def test_sentencepiece(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "in.txt").write_text("the cat and the other cat, the theatre\n" * 80)
    common = {"input": str(tmp_path / "in.txt"), "vocab_size": 320, "byte_fallback": True, "minloglevel": 2,
              "model_type": "bpe", "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(model_prefix=str(tmp_path / "m"), **common)
    tokenizer = get_tokenizer(f"sentencepiece:{tmp_path / 'm.model'}")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    assert tokenizer.encode("the cat é") == reference.encode("the cat é") and tokenizer.eod_id == reference.eos_id() > 0
    assert tokenizer.decode([*tokenizer.encode("the cat é"), tokenizer.eod_id]) == "the cat é"
    sentencepiece.SentencePieceTrainer.train(model_prefix=str(tmp_path / "n"), eos_id=-1, **common)
    with pytest.raises(DataError, match="no </s>.*--eod"):
        get_tokenizer(str(tmp_path / "n.model"))
    assert get_tokenizer(f"sentencepiece:{tmp_path / 'n.model'}#<s>").eod_id == 1
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match=r"bad\.model: not a readable"):
        get_tokenizer(str(tmp_path / "bad.model"))


def test_a_corpus_keeps_its_tokenizer(tmp_path, bpe):
    (tmp_path / "a.txt").write_text(TEXT)
    prepare([tmp_path / "a.txt"], tmp_path / "c", tokenizer=get_tokenizer(f"hf:{bpe}"), workers=2)
    meta = read_meta(tmp_path / "c")
    assert meta is not None and meta.tokenizer == "hf:c.tokenizer.json#<|endoftext|>" and meta.eod_id == 299
    assert (tmp_path / "c.tokenizer.json").read_bytes() == bpe.read_bytes()
    again = get_tokenizer(tokenizer_name(tmp_path / "c", meta))
    assert identity_of(again)["hash"] == meta.tokenizer_hash
    assert again.decode(IndexedDataset(tmp_path / "c").document(0).tolist()) == TEXT


@pytest.mark.parametrize("name", ["hf:../t.json", "hf:/etc/passwd", "sentencepiece:a/b.model#</s>", "hf:..", "hf:"])
def test_a_sidecar_may_not_point_elsewhere(tmp_path, name):
    (tmp_path / "a.txt").write_text(TEXT)
    prepare([tmp_path / "a.txt"], tmp_path / "c", tokenizer=get_tokenizer("byte"))
    found = read_meta(tmp_path / "c")
    assert found is not None
    meta = replace(found, tokenizer=name)
    with pytest.raises(DataError, match="not beside the corpus"):
        tokenizer_name(tmp_path / "c", meta)


@pytest.mark.parametrize("field", ["tokenizer", "tokenizer_hash"])
def test_a_sidecar_s_names_are_short(tmp_path, field):
    """Messages quote them: a damaged one made an error of 20,000 characters."""
    (tmp_path / "a.txt").write_text(TEXT)
    prepare([tmp_path / "a.txt"], tmp_path / "c", tokenizer=get_tokenizer("byte"))
    path = meta_path(tmp_path / "c")
    path.write_text(json.dumps({**json.loads(path.read_text()), field: "x" * 20_000}))
    with pytest.raises(DataError, match=f"{field} has 20000 characters, more than 1024") as refused:
        read_meta(tmp_path / "c")
    assert len(str(refused.value)) < 500


def test_which_piece_ends_a_document(tmp_path, bpe):
    content = json.loads(bpe.read_text())
    for token in content["added_tokens"]:
        token["content"] = "<fin>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="nothing says which piece.*--eod"):
        get_tokenizer(str(tmp_path))
    assert get_tokenizer(str(tmp_path), eod="<fin>").eod_id == 299
    with pytest.raises(DataError, match="no piece '<end>'"):
        get_tokenizer(str(tmp_path), eod="<end>")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<fin>"}}')
    found = get_tokenizer(str(tmp_path))
    assert found.eod_id == 299 and found.name.endswith("tokenizer.json#<fin>")
    assert identity_of(get_tokenizer(found.name)) == identity_of(found)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a readable tokenizer.json"):
        get_tokenizer(str(tmp_path))
