"""Are the copies of replicated parameters still equal on every rank?

Drift is silent: a gradient that one rank does not sum, or a bit that flips in one
memory, lets a copy walk away while the loss still falls. Each rank hashes its copies
to one 64-bit number a parameter; over each group of replicas minimum and maximum
must agree. Where they do not, the group says which rank is the odd one out.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from megatron_port.core.dist.agree import agree, gather_names
from megatron_port.core.dist.counter import key_of, random_bits
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.dist.row_hashes import odd_ones
from megatron_port.core.engine.api import Engine
from megatron_port.core.errors import NumericsError
from megatron_port.core.io.logging import ranks_text
from megatron_port.core.train.hooks import LoopHook, every

CHUNK_WORDS = {"cpu": 1 << 17, "cuda": 1 << 22}
"""Words hashed at a time: what fits a core's cache, and what keeps a GPU busy. Bounds the memory: 16 bytes each."""
COPIES = (REPLICAS, ("tp",), ("kv_copies",), ("expert_shard",), ("expert_replicate",), ("expert_tp",))
"""Sets of axes over which copies are compared: the first that a parameter is replicated over, then what is left. The
last three are of experts that ranks divide."""


class BitsHash:
    """Hasher of tensors' bits: 64-bit hashes that depend on positions, with constant memory.

    The words (32 bits) of a chunk are multiplied by fixed random odd numbers and summed modulo 2^64; the chunks' sums
    are mixed with their index and added. A change of one word always changes the sum of its chunk (an odd number has
    an inverse), changes of several cancel with probability 2^-32 at most (multilinear hashing). Hashes compare within
    one kind of device only.
    """

    def __init__(self, device: torch.device) -> None:
        size = CHUNK_WORDS.get(device.type, 1 << 20)
        counter = torch.arange(size, dtype=torch.int64, device=device)
        self._factors = random_bits(counter, key_of("replica hash")) | 1
        self._buffer = torch.empty_like(self._factors)

    @torch.no_grad()
    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the hash, an int64 scalar on the tensor's device. Any dtype of 2, 4 or 8 bytes."""
        flat = tensor.detach().contiguous().view(-1)
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        if not flat.numel():
            return total
        sums = [self._chunk(words) for words in self._words(flat)]
        index = torch.arange(len(sums), dtype=torch.int64, device=flat.device)
        return total + random_bits(torch.stack(sums), index).sum()

    def _words(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the bits as chunks of 32-bit words, and what is left over as one shorter word."""
        size = flat.element_size()
        step = len(self._factors) * 4 // size
        even = flat.numel() * size // 4 * 4 // size
        for at in range(0, even, step):
            part = flat[at : min(at + step, even)]
            # A view of wider words must begin at one; a copy does (another stage's copy may, and must hash alike).
            yield (part if part.storage_offset() * size % 4 == 0 else part.clone()).view(torch.int32)
        if even < flat.numel():
            yield flat[even:].view(torch.int16)

    def _chunk(self, words: torch.Tensor) -> torch.Tensor:
        buffer = self._buffer[: len(words)]
        return buffer.copy_(words).mul_(self._factors[: len(words)]).sum()


def _explain(
    axis: str, group: dist.ProcessGroup, hashes: torch.Tensor, names: Sequence[str], ctx: ParallelContext, step: int
) -> NumericsError | None:
    """Collective over a group whose members hold different bits: an error on the first rank that is at fault.

    Args:
        hashes: int64 [len(names)] of the parameters that differ.
    """
    members = dist.get_process_group_ranks(group)
    gathered = [torch.empty_like(hashes) for _ in members]
    dist.all_gather(gathered, hashes, group=group)
    hosts = gather_names(socket.gethostname(), group=group, device=hashes.device)
    values = [g.tolist() for g in gathered]
    odd = odd_ones([v[0] for v in values])
    if members[odd[0]] != ctx.rank:
        return None  # that rank speaks
    all_odd = sorted({members[i] for k in range(len(names)) for i in odd_ones([v[k] for v in values])})
    where = ", ".join(f"rank {r} on {hosts[members.index(r)]}" for r in all_odd[:8])
    more = f" and {len(all_odd) - 8} more" if len(all_odd) > 8 else ""
    agreed = Counter(v[0] for v in values).most_common(1)[0][1]
    if 2 * agreed > len(members):
        verdict = f"{where}{more} hold{'' if len(all_odd) > 1 else 's'} other bits than the {agreed} that agree"
    else:
        verdict = (
            f"{where}{more} and rank {members[0]} on {hosts[0]} hold different bits, and no majority says who is wrong"
        )
    return NumericsError(
        f"after step {step} the copies of {names[0]}{f' and {len(names) - 1} more parameters' if names[1:] else ''} "
        f"differ over the {axis} group of {ranks_text(members)}: {verdict}. One rank alone: suspect its memory, "
        "leave the host out; the same parameters again: report the layout. Resume from a checkpoint before this step"
    )


def check_replicas(engine: Engine, ctx: ParallelContext, *, step: int) -> None:
    """Compare the copies of every replicated parameter and buffer over data, tensor, key/value, expert and tied groups.
    Collective.

    Costs one pass over this rank's weights, two all-reduces of 8 bytes per parameter for each kind of group, and one
    synchronisation.

    Raises:
        NumericsError: on every rank alike, naming the ranks whose copies are the odd ones, their hosts, and the
            first parameter that differs.
    """
    found: NumericsError | None = None
    digest = BitsHash(ctx.device)
    # Each is hashed when its turn comes: under ZeRO stage 3 its values are there only then.
    pairs = [(record, digest(p)) for record, p in engine.named_parameters()]
    pairs += [(record, digest(buffer)) for record, buffer in engine.buffers]
    if not pairs:
        agree(None)
        return
    hashes = torch.stack([value for _, value in pairs])
    mesh = ctx.mesh
    compared: list[tuple[str, dist.ProcessGroup | None, list[bool]]] = []
    left = [record.replicated_over(mesh) for record, _ in pairs]
    for axes in COPIES:
        dims = mesh.dims(*axes)
        use = [bool(dims) and dims <= copies for copies in left]
        left = [copies - dims if chosen else copies for copies, chosen in zip(left, use)]
        compared.append((axes[0], ctx.over(*axes), use))
    for key in sorted({r.tied_key for r, _ in pairs if r.tied_key is not None}):
        compared.append((key, ctx.tied_group(key), [r.tied_key == key for r, _ in pairs]))
    for axis, group, use in compared:
        chosen = torch.tensor([i for i, u in enumerate(use) if u], dtype=torch.int64, device=hashes.device)
        if group is None or not len(chosen):
            continue
        low, high = hashes[chosen].clone(), hashes[chosen].clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        bad = (low != high).nonzero().flatten()
        if len(bad):  # alike on all members of the group
            names = [pairs[int(chosen[i])][0].name for i in bad.tolist()]
            error = _explain(axis, group, hashes[chosen][bad], names, ctx, step)
            found = found or error
    agree(found, where=str(ctx.coords))


class ReplicaCheck(LoopHook):
    """Compare the copies of weights every ``telemetry.replica_check_interval`` steps."""

    def due(self, step: int) -> bool:
        """Return whether an interval ends."""
        return every(self.state.config.telemetry.replica_check_interval, step)

    def act(self) -> None:
        """Raise NumericsError on every rank where copies differ."""
        check_replicas(self.state.engine, self.state.ctx, step=self.state.progress.step)
