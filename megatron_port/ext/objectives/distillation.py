"""The loss of a token that a teacher also judges, over a split vocabulary; no logits are ever gathered.

With logits s of the model and t of the teacher, p = softmax(t/T) and q = softmax(s/T), it is
α CE(s, label) + (1 - α) T² KL, where KL is KL(p‖q) (forward) or KL(q‖p) (reverse). Per token two reductions over the
ranks that share the vocabulary suffice: the maxima of s and t, then all sums at once, the one inside KL among them:
with a = s - max s and b = t - max t, KL(p‖q) = Σ e^(b/T) (b - a)/T / Σ e^(b/T) - log Σ e^(b/T) + log Σ e^(a/T).

The gradients are analytic and need no reduction of their own: T (q - p) for the forward divergence,
T q (log q - log p - KL) for the reverse one, times 1 - α, beside α (softmax(s) - onehot). As in
``layers.cross_entropy`` statistics are float32 (float64 for float64 logits), padded columns take no part, and the
gradient is written over the model's logits.

A stored teacher gives its k most likely tokens and the mass of all others (``Stored``). Then the outcomes of KL are
k + 1: these tokens, and "any other one", with probabilities p_r and q_r = Σ q over the other columns. That is the KL
of the coarser distributions, never above the whole one and equal to it where k is the vocabulary. Within the tail the
model is free: its gradient there keeps the proportions of q.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from megatron_port.core.data.dataset import Sample
from megatron_port.core.dist.collectives import Group
from megatron_port.core.errors import DataError
from megatron_port.core.io.files import open_regular, write_bytes
from megatron_port.core.io.typed_json import parse_json, typed
from megatron_port.core.layers.fused import FirstOrderFunction, first_order

# Teacher's distribution at a position as a file stores it: its most likely tokens, and the mass of all others.

@dataclass(frozen=True)
class Stored:
    """Distributions at the temperature that the file states; log-probabilities are natural.

    Leading dimensions are those of the tokens.
    """

    ids: torch.Tensor
    """int64 [..., k]: the most likely tokens"""
    log_probabilities: torch.Tensor
    """[..., k]: theirs"""
    log_tail: torch.Tensor
    """[...]: of any other token; -inf where there is none"""

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Stored:
        """Return this with each tensor changed."""
        return Stored(change(self.ids), change(self.log_probabilities), change(self.log_tail))


_CHUNK = 1 << 22
"""Logits taken at a time, in place of wide copies of all."""
_SPENT = "distillation: a second backward pass through logits over which the first one has written their gradient"


@dataclass(frozen=True)
class Objective:
    """Parts of the loss per token: ``alpha`` CE + (1 - ``alpha``) ``temperature``² KL, forward or ``reverse``."""

    alpha: float
    temperature: float
    reverse: bool = False


class _Dense:
    """KL from the teacher's logits [rows, v], of which this rank has the model's columns."""

    sums = 2

    def __init__(self, logits: torch.Tensor, objective: Objective) -> None:
        self.logits, self.objective = logits, objective

    def maximum(self, part: slice, extent: int, wide: torch.dtype) -> torch.Tensor | None:
        return self.logits[part, :extent].amax(dim=-1).to(wide)

    def _shifted(self, a: torch.Tensor, part: slice, maximum: torch.Tensor) -> torch.Tensor:
        return (self.logits[part, : a.shape[1]].to(a.dtype) - maximum[part, None]).div_(self.objective.temperature)

    def local(
        self, a: torch.Tensor, e: torch.Tensor, part: slice, maximum: torch.Tensor, offset: int
    ) -> list[torch.Tensor]:
        """Return this rank's Σ e^b and the sum within KL; a, b: shifted logits over T, e = e^a."""
        b = self._shifted(a, part, maximum)
        f = b.exp()
        return [f.sum(dim=-1), (e * (a - b) if self.objective.reverse else f * (b - a)).sum(dim=-1)]

    def divergence(self, z: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Return KL [rows], from the model's Σ e^a and the sums over all ranks."""
        total, within = sums.unbind()
        between = z.log() - total.log()
        found: torch.Tensor = within / z - between if self.objective.reverse else within / total + between
        return found

    def gradient(
        self, a: torch.Tensor, q: torch.Tensor, part: slice, maximum: torch.Tensor, z: torch.Tensor,
        sums: torch.Tensor, divergence: torch.Tensor, offset: int,
    ) -> torch.Tensor:
        """Return T dKL/ds [rows, columns]."""
        b, total = self._shifted(a, part, maximum), sums[0]
        if not self.objective.reverse:
            return q - b.exp_().div_(total[:, None])
        shift = (total.log() - z.log() - divergence)[:, None]  # log q - log p - KL, without its a - b
        return q * (a - b).add_(shift)


class _Sparse:
    """KL from the tokens that a file keeps, and one outcome for all others."""

    sums = 3

    def __init__(self, stored: Stored, objective: Objective, wide: torch.dtype) -> None:
        k = stored.ids.shape[-1]
        self.ids, self.objective = stored.ids.reshape(-1, k), objective
        self.log_p = stored.log_probabilities.reshape(-1, k).to(wide)
        self.log_tail = stored.log_tail.reshape(-1).to(wide)

    def maximum(self, part: slice, extent: int, wide: torch.dtype) -> torch.Tensor | None:
        return None

    def _columns(self, part: slice, offset: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(column of each kept token [rows, k], one beyond the last where it is another rank's; whether it is here)."""
        at = self.ids[part] - offset
        here = (at >= 0) & (at < columns)
        return at.masked_fill(~here, columns), here

    def local(
        self, a: torch.Tensor, e: torch.Tensor, part: slice, maximum: torch.Tensor, offset: int
    ) -> list[torch.Tensor]:
        """Return this rank's Σ e^a over the tail, Σ e^a over the kept tokens, and the sum within KL over these."""
        at, here = self._columns(part, offset, a.shape[1])
        a_kept, log_p = _padded(a).gather(1, at), self.log_p[part]
        e_kept = torch.where(here, a_kept.exp(), 0.0)
        tail = _padded(e).scatter(1, at, 0.0).sum(dim=-1)
        inner = e_kept * (a_kept - log_p) if self.objective.reverse else -log_p.exp() * a_kept
        return [tail, e_kept.sum(dim=-1), torch.where(here, inner, 0.0).sum(dim=-1)]

    def divergence(self, z: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Return KL [rows] over the k + 1 outcomes."""
        tail, kept, within = sums.unbind()
        log_z = z.log()
        out: torch.Tensor
        log_q_tail = _log(tail) - log_z
        if self.objective.reverse:
            out = within / z - kept / z * log_z
            out += torch.where(tail > 0, tail / z * (log_q_tail - self.log_tail), 0.0)
            return out
        p, p_tail = self.log_p.exp(), self.log_tail.exp()
        out = within + (p * self.log_p).sum(dim=-1) + p.sum(dim=-1) * log_z
        out += torch.where(p_tail > 0, p_tail * (self.log_tail - log_q_tail), 0.0)
        return out

    def gradient(
        self, a: torch.Tensor, q: torch.Tensor, part: slice, maximum: torch.Tensor, z: torch.Tensor,
        sums: torch.Tensor, divergence: torch.Tensor, offset: int,
    ) -> torch.Tensor:
        """Return T dKL/ds [rows, columns]."""
        at, here = self._columns(part, offset, a.shape[1])
        log_p, log_tail, tail, log_z = self.log_p[part], self.log_tail[part], sums[0], z.log()
        at_kept = _padded(a).gather(1, at)
        q_kept = (at_kept - log_z[:, None]).exp()
        if self.objective.reverse:
            of_tail = _log(tail) - log_z - log_tail - divergence
            kept = q_kept * (at_kept - log_z[:, None] - log_p - divergence[:, None])
        else:
            of_tail = 1.0 - (log_tail + log_z - _log(tail)).exp()
            kept = q_kept - log_p.exp()
        of_tail = torch.where(tail > 0, of_tail, 0.0)
        return _padded(q * of_tail[:, None]).scatter(1, at, torch.where(here, kept, 0.0))[:, :-1]


def _log(x: torch.Tensor) -> torch.Tensor:
    """log x, finite where a sum has underflowed to 0."""
    return x.clamp(min=torch.finfo(x.dtype).tiny).log()


def _padded(x: torch.Tensor) -> torch.Tensor:
    """[rows, columns + 1]: with a column of zeros, which stands for the tokens of other ranks."""
    return torch.nn.functional.pad(x, (0, 1))


class _VocabParallelDistillation(FirstOrderFunction):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor | Stored, objective: Objective,
        offset: int, extent: int, group: Group,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        rows, flat = logits.view(-1, logits.shape[-1]), labels.reshape(-1)
        target: _Dense | _Sparse = _Sparse(teacher, objective, wide) if isinstance(teacher, Stored) else _Dense(
            teacher.reshape(-1, teacher.shape[-1]), objective)
        count, t = rows.shape[0], objective.temperature
        maxima = torch.full((2, count), float("-inf"), dtype=wide, device=logits.device)
        for part in _parts(rows) if extent else ():
            maxima[0, part] = rows[part, :extent].amax(dim=-1).to(wide)
            other = target.maximum(part, extent, wide)
            maxima[1, part] = maxima[0, part] if other is None else other
        if group is not None:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        sums = torch.zeros((3 + target.sums, count), dtype=wide, device=logits.device)
        for part in _parts(rows) if extent else ():
            shifted = rows[part, :extent].to(wide) - maxima[0, part, None]
            index, outside = _label_columns(flat[part], offset, extent)
            sums[0, part] = shifted.exp().sum(dim=-1)
            sums[1, part] = shifted.gather(-1, index).squeeze(-1).masked_fill_(outside, 0.0)
            a = shifted.div_(t)
            e = a.exp()
            sums[2, part] = e.sum(dim=-1)
            sums[3:, part] = torch.stack(target.local(a, e, part, maxima[1], offset))
        if group is not None:
            dist.all_reduce(sums, group=group)
        entropy, divergence = sums[0].log() - sums[1], target.divergence(sums[2], sums[3:])
        ctx.save_for_backward(logits, labels, maxima, sums, divergence)
        ctx.target, ctx.offset, ctx.extent, ctx.spent = target, offset, extent, False
        loss = objective.alpha * entropy + (1.0 - objective.alpha) * t * t * divergence
        ctx.mark_non_differentiable(entropy, divergence)
        ctx.set_materialize_grads(False)
        return loss.view(labels.shape), entropy.view(labels.shape), divergence.view(labels.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor, *unused: torch.Tensor | None) -> tuple[Any, ...]:
        if ctx.spent:
            raise RuntimeError(_SPENT)
        ctx.spent = True
        logits, labels, maxima, sums, divergence = ctx.saved_tensors
        target, extent, objective = ctx.target, ctx.extent, ctx.target.objective
        out = logits.detach()
        rows, flat, given = out.view(-1, out.shape[-1]), labels.reshape(-1), grad.reshape(-1).to(maxima.dtype)
        rows[:, extent:] = 0.0
        for part in _parts(rows) if extent else ():
            shifted = rows[part, :extent].to(maxima.dtype) - maxima[0, part, None]
            whole = shifted.exp().div_(sums[0, part, None])
            index, outside = _label_columns(flat[part], ctx.offset, extent)
            whole.scatter_add_(-1, index, outside.to(whole.dtype).sub_(1.0).unsqueeze(-1)).mul_(objective.alpha)
            a = shifted.div_(objective.temperature)
            q = a.exp().div_(sums[2, part, None])
            of_kl = target.gradient(
                a, q, part, maxima[1], sums[2, part], sums[3:, part], divergence[part], ctx.offset
            )
            whole.add_(of_kl, alpha=(1.0 - objective.alpha) * objective.temperature)
            rows[part, :extent] = whole.mul_(given[part, None]).to(rows.dtype)
        # As in layers.cross_entropy: a second loss of the same logits is to see the change.
        torch.autograd.graph.increment_version(out)
        return out, None, None, None, None, None, None


def _parts(rows: torch.Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        yield slice(start, start + step)


def _label_columns(labels: torch.Tensor, offset: int, extent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(column of each label [rows, 1], 0 where it is none of this rank's; whether that is so [rows])."""
    local = labels - offset
    outside = (local < 0) | (local >= extent)
    return local.masked_fill(outside, 0).unsqueeze(-1), outside


def vocab_parallel_distillation(
    logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor | Stored, objective: Objective, *, offset: int,
    extent: int, group: Group,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss, cross-entropy, KL) of each token [seq, batch] in nats; the loss alone has a gradient.

    A backward pass overwrites ``logits`` [seq, batch, padded_vocab/tp]. ``teacher``: its logits, split in the same way
    and left as they are, or what a file keeps of them. ``labels`` int64 [seq, batch] (global ids); this rank's columns
    are the ids [offset, offset + extent). KL is without the factor T². A label that is no rank's id has a meaningless
    loss, which is to be masked. Float32 (float64 for float64 logits).

    Raises RuntimeError in a second backward pass through the same logits.
    """
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _VocabParallelDistillation.apply(
        logits.contiguous(), labels.contiguous(), teacher, objective, offset, extent, group
    )
    return out


# A teacher's most likely tokens at every position of a training order, computed ahead: ``distill logits`` writes them.
#
# A folder: ``header.json`` says of what, and ``block-N.bin`` has the records of ``block`` samples, numbered as the
# run consumes them. A record is of one sample: a hash of the tokens (and document starts) that the teacher read, ids
# [seq, k], log-probabilities [seq, k] and that of all other tokens [seq], then a hash over all of it, the sample's
# number and the header. Every record is compared with its hash, and with the sample that it is used for, before it is
# used. A block is written whole or not at all, so an interrupted run of the command continues where it was.

HEADER = "header.json"
HEADER_BYTES = 1 << 16
"""More than any header has."""
_DIGEST, _TOKENS = 16, 8
FORMATS = {"fp32": "<f4", "fp64": "<f8"}


@dataclass(frozen=True, kw_only=True)
class LogitsHeader:
    """Description of the work that the records belong to; the same bytes for the same work."""

    teacher: str
    """Path of its weights."""
    fingerprint: str
    """Fingerprint of their values (``weights.readers``)."""
    computed_in: str
    """The dtype of the teacher's passes."""
    vocab_size: int
    seq_length: int
    top: int
    """Tokens kept at each position, k."""
    temperature: float
    values: str
    """fp32 | fp64: of the log-probabilities."""
    samples: int
    block: int
    """Samples in a block; the last one may have fewer."""
    format: int = 1

    def text(self) -> bytes:
        """Return the bytes of the file."""
        body = json.dumps(asdict(self), sort_keys=True)
        return json.dumps({"header": asdict(self), "xxh3": xxhash.xxh3_128_hexdigest(body.encode())},
                          sort_keys=True, indent=1).encode() + b"\n"

    @property
    def id_type(self) -> str:
        """Dtype of stored ids."""
        return "<u2" if self.vocab_size <= 1 << 16 else "<u4"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of a record's ids, log-probabilities and tails."""
        elements, width = self.seq_length * self.top, np.dtype(FORMATS[self.values]).itemsize
        return elements * np.dtype(self.id_type).itemsize, elements * width, self.seq_length * width

    @property
    def record_bytes(self) -> int:
        """Bytes of a sample's record."""
        return _TOKENS + sum(self.sizes) + _DIGEST

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.samples // self.block)

    def samples_of(self, block: int) -> range:
        """Return the samples of a block."""
        return range(block * self.block, min((block + 1) * self.block, self.samples))


@dataclass(frozen=True)
class _HeaderFile:
    header: LogitsHeader


def block_path(folder: Path, block: int) -> Path:
    """Return the file of a block."""
    return folder / f"block-{block:08d}.bin"


def read_header(folder: Path) -> LogitsHeader | None:
    """Return what a folder's records are of; None: there is no header. Raises DataError where it is damaged."""
    path = folder / HEADER
    try:
        with open(open_regular(path, follow=True), "rb") as stream:
            text = stream.read(HEADER_BYTES)
        header = typed(_HeaderFile, parse_json(text)).header
        positive = ("vocab_size", "seq_length", "top", "samples", "block")
        if header.format != 1 or header.text() != text or header.values not in FORMATS or not all(
            isinstance(getattr(header, name), int) and getattr(header, name) > 0 for name in positive
        ):
            raise ValueError("it is not what was written")
        return header
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: damaged ({type(error).__name__}: {error}); write the folder again with "
                        "`megatron-port distill logits`") from None


def tokens_hash(sample: Sample) -> bytes:
    """Return 8 bytes that tell what a teacher reads of a sample."""
    found = xxhash.xxh3_64(np.ascontiguousarray(sample.tokens, dtype="<i8").tobytes())
    if sample.starts is not None:
        found.update(np.ascontiguousarray(sample.starts, dtype="<i4").tobytes())
    return found.digest()


class StoredLogits:
    """The records of a folder.

    Raises:
        DataError: no header, or a damaged one.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        header = read_header(self.folder)
        if header is None:
            raise DataError(f"{self.folder / HEADER}: no such file; write the folder with `megatron-port distill "
                            "logits RUN`")
        self.header = header
        self._identity = xxhash.xxh3_128_digest(header.text())

    def check(self, *, vocab_size: int, seq_length: int, temperature: float, samples: int) -> None:
        """Check that a run can read them, and that all blocks of ``samples`` are there.

        Raises:
            DataError: they are of another vocabulary, sequence length or temperature, or too few.
        """
        wrong = [
            f"{name} {theirs} and the run's is {mine}" for name, theirs, mine in (
                ("vocab_size", self.header.vocab_size, vocab_size), ("seq_length", self.header.seq_length, seq_length),
                ("temperature", self.header.temperature, temperature),
            ) if theirs != mine
        ]
        if wrong:
            raise DataError(f"{self.folder} was written for {'; for '.join(wrong)}; write it again with "
                            "`megatron-port distill logits`, into another folder")
        if self.header.samples < samples:
            raise DataError(f"{self.folder} has {self.header.samples} samples and the run consumes {samples}; write "
                            "all of them with `megatron-port distill logits`, into another folder")
        for block in range(-(-samples // self.header.block)):
            path, wanted = block_path(self.folder, block), len(self.header.samples_of(block)) * self.header.record_bytes
            found = path.stat().st_size if path.is_file() else -1
            if found != wanted:
                what = "is missing" if found < 0 else f"has {found} bytes, expected {wanted}"
                raise DataError(f"{path} {what}; the same `megatron-port distill logits` continues where it was")

    def record(self, number: int, sample: Sample, stored: Stored) -> bytes:
        """Return the bytes of a sample's record; ``stored``: of [seq] positions."""
        values = FORMATS[self.header.values]
        payload = tokens_hash(sample) + b"".join((
            stored.ids.numpy().astype(self.header.id_type).tobytes(),
            stored.log_probabilities.numpy().astype(values).tobytes(), stored.log_tail.numpy().astype(values).tobytes(),
        ))
        return payload + self._digest(number, payload)

    def _digest(self, number: int, payload: bytes) -> bytes:
        return xxhash.xxh3_128_digest(self._identity + number.to_bytes(8, "little") + payload)

    def read(self, number: int, sample: Sample) -> Stored:
        """Return what is kept of the teacher at the positions of a sample [seq].

        Raises:
            DataError: the record is damaged or missing, or of a sample with other tokens.
        """
        payload = self._payload(number)
        if payload[:_TOKENS] != tokens_hash(sample):
            raise DataError(
                f"{self.folder}: the teacher read other tokens in sample {number} than this run does: another corpus, "
                "seed, order, sequence length or document setting; write the folder with this run's configuration"
            )
        header, (ids, values, _), at = self.header, self.header.sizes, _TOKENS
        shape, kind = (header.seq_length, header.top), FORMATS[header.values]
        raw = np.frombuffer(payload, header.id_type, header.seq_length * header.top, at).reshape(shape)
        log_p = np.frombuffer(payload, kind, header.seq_length * header.top, at + ids).reshape(shape)
        tail = np.frombuffer(payload, kind, header.seq_length, at + ids + values)
        return Stored(torch.from_numpy(raw.astype(np.int64)), torch.from_numpy(log_p.astype(kind[1:])),
                      torch.from_numpy(tail.astype(kind[1:])))

    def _payload(self, number: int) -> bytes:
        size = self.header.record_bytes
        if not 0 <= number < self.header.samples:
            raise DataError(f"{self.folder} has samples 0 to {self.header.samples - 1}, and the run reads {number}; "
                            "write more with `megatron-port distill logits`, into another folder")
        block, at = divmod(number, self.header.block)
        path = block_path(self.folder, block)
        try:
            with open(path, "rb") as stream:
                found = os.pread(stream.fileno(), size, at * size)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; the same `megatron-port distill logits` writes it") from None
        payload, digest = found[:-_DIGEST], found[-_DIGEST:]
        if len(found) != size or digest != self._digest(number, payload):
            raise DataError(f"{path}: the record of sample {number} is damaged: its hash is another; the same "
                            "`megatron-port distill logits` writes the block again")
        return payload

    def damaged(self, block: int) -> list[int]:
        """Return the samples of a block whose record is missing or damaged."""
        out = []
        for number in self.header.samples_of(block):
            try:
                self._payload(number)
            except DataError:
                out.append(number)
        path = block_path(self.folder, block)
        if not out and path.stat().st_size != len(self.header.samples_of(block)) * self.header.record_bytes:
            return list(self.header.samples_of(block))
        return out

    def write_block(self, block: int, records: Iterator[bytes]) -> None:
        """Write a block: whole, or as it was before."""
        write_bytes(block_path(self.folder, block), b"".join(records))


def begin(folder: Path, header: LogitsHeader) -> StoredLogits:
    """Return the records of a folder, which is made where it is new.

    Raises:
        DataError: it has records of something else.
    """
    there = read_header(folder)
    if there is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / HEADER, header.text())
    elif there != header:
        differ = [f"{f.name} is {getattr(there, f.name)} there and {getattr(header, f.name)} here"
                  for f in fields(LogitsHeader) if getattr(there, f.name) != getattr(header, f.name)]
        raise DataError(f"{folder} has records of something else: {'; '.join(differ)}; name another folder, or remove "
                        "this one")
    return StoredLogits(folder)
