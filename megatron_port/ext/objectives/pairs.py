"""Log-probabilities of the answers of a corpus by a frozen model, computed ahead and kept beside it.

``<prefix>.reference`` is a line of JSON that says of what and by which weights, and then float64, little-endian, one of
each document: the sum over its counted tokens. A function of the document alone, whatever layout computed it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from megatron_port.core.data.indexed import IndexedDataset, reference_path
from megatron_port.core.errors import DataError
from megatron_port.core.io.files import open_regular, write_bytes
from megatron_port.core.io.typed_json import parse_json, typed

HEADER_BYTES = 1 << 16
"""More than any header has."""


@dataclass(frozen=True, kw_only=True)
class ReferenceHeader:
    """Identity of the reference's log-probabilities: corpus, weights, dtype."""

    bin_xxh3: str
    mask_xxh3: str
    """Hash of the mask of the corpus."""
    weights: str
    """Where the weights were."""
    fingerprint: str
    """Fingerprint of their values (``weights.readers``)."""
    dtype: str
    """Dtype in which the sums were computed."""
    xxh3: str = ""
    """xxh3-128 of the sums."""
    format: int = 1


@dataclass(frozen=True)
class Reference:
    """The sums of a corpus, float64 [documents], and what they are of."""

    header: ReferenceHeader
    sums: np.ndarray


def write_reference(
    corpus: IndexedDataset, sums: np.ndarray, *, weights: str, fingerprint: str, dtype: str
) -> ReferenceHeader:
    """Write the file of a corpus: whole, or as it was before. Raises DataError where a sum is no log-probability."""
    wrong = np.flatnonzero(~(np.isfinite(sums) & (sums <= 0)))
    if wrong.size:
        raise DataError(f"{corpus.name}: document {wrong[0]} has the log-probability {sums[wrong[0]]} by {weights}; "
                        "use other weights, or a wider precision.dtype")
    assert corpus.meta is not None
    payload = sums.astype("<f8").tobytes()
    header = ReferenceHeader(
        bin_xxh3=corpus.meta.bin_xxh3, mask_xxh3=corpus.meta.mask_xxh3, weights=weights, fingerprint=fingerprint,
        dtype=dtype, xxh3=xxhash.xxh3_128_hexdigest(payload),
    )
    write_bytes(reference_path(corpus.prefix), json.dumps(asdict(header)).encode() + b"\n" + payload)
    return header


def read_header(prefix: str | Path) -> ReferenceHeader | None:
    """Return what the file beside a corpus is of; None: there is none. Raises DataError where it is damaged."""
    path = reference_path(prefix)
    try:
        with open(open_regular(path, follow=True), "rb") as stream:
            raw = parse_json(stream.readline(HEADER_BYTES))
        header = typed(ReferenceHeader, raw)
        if header.format != 1 or not header.xxh3:
            raise ValueError(f"format {header.format!r:.20}")
        return header
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not readable ({type(error).__name__}: {error}); {_again(prefix)}") from None


def read_reference(corpus: IndexedDataset) -> Reference:
    """Return the sums of a corpus, with every byte compared with its hash.

    Raises:
        DataError: there are none, they are damaged, or of other tokens.
    """
    path, header = reference_path(corpus.prefix), read_header(corpus.prefix)
    if header is None:
        raise DataError(f"{path}: no such file: the reference's log-probabilities are computed ahead; "
                        f"{_again(corpus.prefix)}")
    assert corpus.meta is not None
    if (header.bin_xxh3, header.mask_xxh3) != (corpus.meta.bin_xxh3, corpus.meta.mask_xxh3):
        raise DataError(f"{path} is of other tokens than the corpus beside it, which was prepared again since; "
                        f"{_again(corpus.prefix)}")
    payload = path.read_bytes().partition(b"\n")[2]
    found = xxhash.xxh3_128_hexdigest(payload)
    if found != header.xxh3 or len(payload) != 8 * corpus.num_documents:
        raise DataError(f"{path}: {len(payload)} bytes with xxh3-128 {found}; expected {8 * corpus.num_documents} with "
                        f"{header.xxh3}; {_again(corpus.prefix)}")
    return Reference(header, np.frombuffer(payload, "<f8"))


def _again(prefix: str | Path) -> str:
    return f"run `megatron-port evaluate MODEL --reference {prefix}`"


def check_pairs(corpora: Sequence[IndexedDataset], loss: str) -> None:
    """Check that corpora hold pairs, which ``loss`` takes.

    Raises:
        DataError: one does not, or is in a store.
    """
    for corpus in corpora:
        pairs = corpus.meta.pairs if corpus.meta is not None else 0
        if not pairs:
            raise DataError(
                f'{corpus.name}: training.loss "{loss}" takes pairs of answers, and this corpus has none; make one '
                "with `data prepare --preference`"
            )
        if corpus.remote or pairs * 2 != corpus.num_documents:
            raise DataError(
                f"{corpus.name}: copy the corpus to a disk; the log-probabilities of its answers lie beside it" if
                corpus.remote else f"{corpus.name}: {corpus.num_documents} documents of {pairs} pairs; prepare it again"
            )
