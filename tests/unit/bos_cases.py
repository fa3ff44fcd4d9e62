"""Tokenizers that put BOS before a text, made on the spot, in transformers' own forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LINES = ["the cat and the other cat, the theatre: a, b, c.", "two  blanks, naïve"] * 40
PIECES = ("<unk>", "<s>", "</s>", "<pad>")
POSTS = ("none", "bytes", "bos", "both", "sequence")


def tokenizer_json(folder: Path, kind: str, post: str, **settings: Any) -> Path:
    """Write a ``bytes`` (byte-level) or ``blanks`` (SentencePiece-like) tokenizer.json of 300 ids with that
    post-processor; ``settings``: more of tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if kind == "bytes" else (
        pre_tokenizers.Metaspace(prepend_scheme="first", split=True))
    made.decoder = decoders.ByteLevel() if kind == "bytes" else decoders.Metaspace(prepend_scheme="first")
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else []
    made.train_from_iterator(LINES, trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(PIECES), initial_alphabet=alphabet, show_progress=False))
    bos, both = (processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
                 for single in ("<s> $A", "<s> $A </s>"))
    byte_level = processors.ByteLevel(trim_offsets=True)
    if post != "none":
        made.post_processor = {"bytes": byte_level, "bos": bos, "both": both,
                               "sequence": processors.Sequence([byte_level, bos])}[post]
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    body = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(body))
    return folder


def sentencepiece_model(folder: Path, **settings: Any) -> Path:
    """Write a SentencePiece tokenizer.model of 300 ids as Gemma's, and tokenizer_config.json."""
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "in.txt").write_text("\n".join(LINES))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "in.txt"), model_prefix=str(folder / "tokenizer"), vocab_size=300, byte_fallback=True,
        minloglevel=2, model_type="bpe", hard_vocab_limit=False, pad_id=0, eos_id=1, bos_id=2, unk_id=3,
        bos_piece="<bos>", eos_piece="<eos>", pad_piece="<pad>", add_dummy_prefix=False,
        normalization_rule_name="identity", remove_extra_whitespaces=False)
    body = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(body))
    return folder
