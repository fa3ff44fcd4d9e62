"""The folder of a teacher's logits: every byte is checked before it is used."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_port.core.data.dataset import Sample
from megatron_port.core.errors import DataError
from megatron_port.ext.objectives.distillation import LogitsHeader, Stored, StoredLogits, begin, block_path
from megatron_port.ext.objectives.distilled import vocab_parallel_top

HEADER = LogitsHeader(
    teacher="runs/large", fingerprint="ab" * 16, computed_in="fp64", vocab_size=50, seq_length=3, top=2,
    temperature=2.0, values="fp64", samples=5, block=2,
)


def sample(number: int) -> Sample:
    return Sample(np.arange(number, number + 4), np.array([0, 0, 2], dtype=np.int32))


def kept(number: int) -> Stored:
    g = torch.Generator().manual_seed(number)
    return Stored(torch.randint(0, 50, (3, 2), generator=g), -torch.rand(3, 2, generator=g, dtype=torch.float64),
                  -torch.rand(3, generator=g, dtype=torch.float64))


def written(folder: Path) -> StoredLogits:
    stored = begin(folder, HEADER)
    for block in range(HEADER.blocks):
        stored.write_block(block, (stored.record(n, sample(n), kept(n)) for n in HEADER.samples_of(block)))
    return stored


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    written(tmp_path)
    again = StoredLogits(tmp_path)
    again.check(vocab_size=50, seq_length=3, temperature=2.0, samples=5)
    for number in range(5):
        found, wanted = again.read(number, sample(number)), kept(number)
        for field in dataclasses.fields(Stored):
            assert torch.equal(getattr(found, field.name), getattr(wanted, field.name))
    assert not any(again.damaged(block) for block in range(3))
    with pytest.raises(DataError, match="has 5 samples and the run consumes 6"):
        again.check(vocab_size=50, seq_length=3, temperature=2.0, samples=6)
    with pytest.raises(DataError, match="samples 0 to 4, and the run reads 5"):
        again.read(5, sample(5))
    with pytest.raises(DataError, match="other tokens in sample 1"):
        again.read(1, sample(2))
    with pytest.raises(DataError, match="other tokens"):  # another document setting
        again.read(1, Sample(sample(1).tokens))


def test_damage_in_any_byte_is_found(tmp_path: Path) -> None:
    written(tmp_path)
    for path in (tmp_path / "header.json", block_path(tmp_path, 2)):
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
            with pytest.raises(DataError):
                StoredLogits(tmp_path).read(4, sample(4))
        for cut in (whole[:-1], b""):
            path.write_bytes(cut)
            with pytest.raises(DataError):
                StoredLogits(tmp_path).read(4, sample(4))
        path.write_bytes(whole)
    StoredLogits(tmp_path).read(4, sample(4))


def test_a_record_serves_its_own_sample_and_folder_only(tmp_path: Path) -> None:
    """Records of equal tokens that change places, and a block of another temperature."""
    stored = written(tmp_path / "a")
    path = block_path(stored.folder, 0)
    whole, size = path.read_bytes(), HEADER.record_bytes
    path.write_bytes(whole[size:] + whole[:size])
    with pytest.raises(DataError, match="damaged"):
        stored.read(0, sample(1))
    other = begin(tmp_path / "b", dataclasses.replace(HEADER, temperature=1.0))
    block_path(other.folder, 0).write_bytes(whole)
    with pytest.raises(DataError, match="damaged"):
        other.read(0, sample(0))
    with pytest.raises(DataError, match=r"temperature is 1\.0 there and 2\.0 here"):
        begin(tmp_path / "b", HEADER)


def test_a_block_that_is_missing_or_too_long_is_named(tmp_path: Path) -> None:
    stored = written(tmp_path)
    path = block_path(tmp_path, 1)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(DataError, match="block-00000001.bin has"):
        stored.check(vocab_size=50, seq_length=3, temperature=2.0, samples=5)
    assert stored.damaged(1)
    path.unlink()
    with pytest.raises(DataError, match=r"block-00000001.bin is missing"):
        stored.check(vocab_size=50, seq_length=3, temperature=2.0, samples=5)
    stored.check(vocab_size=50, seq_length=3, temperature=2.0, samples=2)


def test_of_equal_logits_the_smaller_ids_are_kept() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 9.0]])
    found = vocab_parallel_top(x, 2, 1.0, offset=0, extent=5, group=None)  # the last column is padding
    assert found.ids.tolist() == [[1, 2]]
    whole = x[:, :5].log_softmax(-1)
    torch.testing.assert_close(found.log_probabilities, whole[:, 1:3])
    torch.testing.assert_close(found.log_tail, whole[:, [0, 3, 4]].logsumexp(-1))
