"""Hashes of a tensor's bits by rows of 16 KiB. From two hashes of a row one changed word can be computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from megatron_port.core.dist.counter import key_of, random_bits

ROW = 4096
"""Words (32 bits) with one hash: 8 bytes are kept for 16 KiB."""
CHUNK_ROWS = {"cpu": 32, "cuda": 1024}
"""Rows hashed at a time: what fits a core's cache, and what keeps a GPU busy. Bounds the memory: 32 KiB a row."""
_WORDS = (torch.int32, torch.int16, torch.int8)


def row_factors(device: torch.device) -> torch.Tensor:
    """Return the fixed random odd number of each word of a row, int64 [ROW]."""
    return random_bits(torch.arange(ROW, dtype=torch.int64, device=device), key_of("state rows")) | 1


class RowHashes:
    """64-bit hashes of a tensor's rows of ``ROW`` words: each word times a fixed random odd number, summed mod 2^64.

    A change of one word always changes its row's hash (an odd number has an inverse); changes of several cancel with
    probability 2^-32 at most (multilinear hashing). Hashes compare within one process only. Words are integers, so that
    nothing here is recorded for a gradient.
    """

    def __init__(self, device: torch.device) -> None:
        self.factors = row_factors(device)
        self._buffer = torch.empty((CHUNK_ROWS.get(device.type, 256), ROW), dtype=torch.int64, device=device)
        self._host = device.type == "cpu"  # no integer matrix-vector product elsewhere

    @staticmethod
    def words(flat: torch.Tensor) -> torch.Tensor:
        """Return the bits of a flat tensor as words: int32, or int16 or int8 where they do not divide into those."""
        flat = flat.detach()
        size = flat.element_size()
        total, begin = flat.numel() * size, flat.storage_offset() * size
        return flat.view(next(d for d in _WORDS if total % d.itemsize == 0 and begin % d.itemsize == 0))

    def __call__(self, flat: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return int64 [rows], in ``out`` where given. Launches a few kernels for 16 MiB and waits for nothing."""
        return self.of_words(self.words(flat), out)

    def of_words(self, words: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the hashes of rows of :meth:`words`."""
        whole, rest = divmod(words.numel(), ROW)
        rows = whole + bool(rest)
        if out is None:
            out = torch.empty(rows, dtype=torch.int64, device=words.device)
        table, step = words[: whole * ROW].view(whole, ROW), self._buffer.shape[0]
        for at in range(0, whole, step):
            count = min(step, whole - at)
            self._sum(self._buffer[:count].copy_(table[at : at + count]), self.factors, out[at : at + count])
        if rest:
            self._sum(self._buffer[:1, :rest].copy_(words[whole * ROW :]), self.factors[:rest], out[whole:])
        return out

    def _sum(self, wide: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
        if self._host:
            torch.mv(wide, factors, out=out)
        else:
            torch.sum(wide.mul_(factors), dim=1, out=out)


def one_word(factors: torch.Tensor, difference: int, *, bits: int) -> tuple[int, int] | None:
    """The one word whose change explains a difference of hashes: (index, change); None: there is none, or several.

    ``change * factor = difference`` modulo 2^64 has one solution a word, and a real change has ``bits`` bits: by chance
    that happens to one of the others once in 2^19 cases.
    """
    inverse = factors.clone()
    for _ in range(5):  # Newton's iteration doubles the correct low bits: 3, 6, … 96
        inverse = inverse * (2 - factors * inverse)
    wrapped = (difference + (1 << 63)) % (1 << 64) - (1 << 63)
    changes = inverse * wrapped
    found = (changes.abs() < (1 << bits)).nonzero().flatten().tolist()
    return (found[0], int(changes[found[0]])) if len(found) == 1 else None


def odd_ones(hashes: Sequence[int]) -> list[int]:
    """Return positions whose value is not the most frequent; where none is, all but those equal to the first."""
    counts = Counter(hashes)
    most = max(counts.values())
    # Without a majority the first copy is the reference.
    reference = hashes[0] if counts[hashes[0]] == most else next(h for h in hashes if counts[h] == most)
    return [i for i, h in enumerate(hashes) if h != reference]
