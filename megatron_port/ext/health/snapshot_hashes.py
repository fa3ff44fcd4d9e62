"""Comparison of what is written with what was to be saved.

A file's own hashes are those of the host memory that it is written from: a bit that flips there, after the copy from
the device and before the file, would be committed with right hashes. So each piece is hashed where it lives, at the
moment of the copy, and the copy is hashed again once it has been written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from megatron_port.core.dist.record import StatePiece
from megatron_port.core.dist.row_hashes import ROW, RowHashes, one_word
from megatron_port.core.errors import CheckpointError


class SnapshotHashes:
    """Hashes of pieces as they are now, on their devices; complete on return."""

    def __init__(self, pieces: Sequence[StatePiece]) -> None:
        self._labels = [f"the {piece.kind} of {piece.name}" for piece in pieces]
        self._starts = [piece.flat_start for piece in pieces]
        self._elements = [piece.tensor.element_size() for piece in pieces]
        self._words: list[torch.dtype] = []
        hashers: dict[torch.device, RowHashes] = {}
        found = []
        for piece in pieces:
            flat = piece.tensor.detach().contiguous()
            flat = flat.as_strided(flat.shape, (1,))  # one element counts as contiguous whatever its stride
            words = RowHashes.words(flat)
            self._words.append(words.dtype)
            if flat.device not in hashers:
                hashers[flat.device] = RowHashes(flat.device)
            found.append(hashers[flat.device].of_words(words))
        self._hashes = [hashes.cpu() for hashes in found]

    def compared(self, data: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the pieces' bytes in host memory, and compare each once its consumer is done with it.

        Raises:
            CheckpointError: they are not what was hashed.
        """
        hasher = RowHashes(torch.device("cpu"))
        for number, part in enumerate(data):
            yield part
            words = torch.frombuffer(part, dtype=torch.uint8).view(self._words[number])
            now = hasher.of_words(words)
            if not torch.equal(now, self._hashes[number]):
                raise CheckpointError(self._fault(number, words, now, hasher.factors))

    def _fault(self, number: int, words: torch.Tensor, now: torch.Tensor, factors: torch.Tensor) -> str:
        bad = (now != self._hashes[number]).nonzero().flatten().tolist()
        row, size, element = bad[0], words.element_size(), self._elements[number]
        count = min(ROW, len(words) - row * ROW)
        one = one_word(factors[:count], int(now[row]) - int(self._hashes[number][row]), bits=8 * size)
        if one is None:
            first, last = (self._starts[number] + at * size // element for at in (row * ROW, row * ROW + count))
            where = f"elements {first} to {last - 1}"
        else:
            where = f"element {self._starts[number] + (row * ROW + one[0]) * size // element}"
        return (
            f"{self._labels[number]} ({where}) changed in this host's memory between the copy from the training state "
            f"and the file ({len(bad)} blocks of {ROW * size} bytes differ): a bit flipped, or a stray write. Nothing "
            "was committed; do not trust this node, leave it out and check its memory"
        )
