"""Training of a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2), written as one tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_port.core.errors import DataError
from megatron_port.core.io.files import write_bytes
from megatron_port.ext.corpora.records import Recipe, texts_of
from megatron_port.ext.corpora.source_files import ReadOptions, find_sources
from megatron_port.ext.corpora.sources import Reader
from megatron_port.ext.corpora.tokenizer import ByteTokenizer
from megatron_port.ext.corpora.unpack import need

END = "<|endoftext|>"
LEAST = 257
"""The 256 bytes and the end of a document."""


def train_bpe(
    paths: Sequence[str | Path], out: str | Path, *, vocab_size: int, options: ReadOptions | None = None,
    bad_input: str = "stop", largest_bytes: int = 0, log: Callable[[str], None] = lambda line: None,
) -> int:
    """Learn ``vocab_size`` pieces from the texts of ``paths`` (as ``data prepare`` reads them); the number learned.

    Any text can be encoded: the 256 bytes are pieces. ``<|endoftext|>`` is the last one. Few texts may hold
    fewer pairs that repeat than were asked for.

    Args:
        largest_bytes: stop reading after this much text; 0: all of it.
        log: called with the table of the inputs, where a folder was read or a file left out.

    Raises:
        DataError: no text, a damaged record (``bad_input`` stop), too small a vocabulary, ``tokenizers`` missing.
    """
    if vocab_size < LEAST:
        raise DataError(f"--vocab-size {vocab_size}: a byte-level BPE has at least {LEAST} (256 bytes and {END})")
    tokenizers = need("tokenizers", "training a BPE")
    options = options or ReadOptions()
    inputs = find_sources(paths, options)
    if inputs.skipped or any(Path(path).is_dir() for path in paths):
        log(inputs.table())
    reader = Reader(inputs.sources, options)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 1, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    seen = 0
    fault: list[DataError] = []

    def corpus() -> Iterator[str]:
        nonlocal seen
        recipe = Recipe(ByteTokenizer(), ByteTokenizer().encode_array("").dtype, options.key, False, bad_input,
                        options.largest_record)
        try:
            for block in reader.blocks():
                for text in texts_of(block, recipe):
                    seen += len(text)
                    yield text
                if largest_bytes and reader.bytes_read >= largest_bytes:
                    return
        except DataError as error:  # the library would turn it into an exception of its own
            fault.append(error)

    tokenizer.train_from_iterator(corpus(), trainer)
    if fault:
        raise fault[0]
    if not seen:
        raise DataError(f"no text in {', '.join(map(str, paths))}")
    tokenizer.add_special_tokens([END])
    write_bytes(Path(out), tokenizer.to_str(pretty=True).encode())
    return int(tokenizer.get_vocab_size(with_added_tokens=True))
