"""Are reduced gradients what the ranks had, equal where they are to be, and still so when the update reads them?

Three comparisons, none of which a loss shows, on the steps that the state check looks at:

* **The sum.** A reduce-scatter leaves each shard on one rank, so that no copy tells a wrong one. Each rank takes signed
  sums of its own gradients over rows of ``SUM_ROW`` elements; they are reduced like the gradients, and must be those
  of the reduced shard, up to rounding (a checksum as of Huang and Abraham, 1984). Signs are fixed random numbers, so
  rounding adds up as a random walk: a change of an element above about 1e-4 of its row's rms shows.
* **The copies.** What an all-reduce leaves on several ranks has one hash on all of them, right before the update.
* **At rest.** What a reduction left is hashed, and again before anything is added and before the update reads it. Every
  bit counts, and is named.

Nothing waits for the host: numbers of differences stay on the device until the step's one synchronisation.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_port.core.dist.agree import gather_names
from megatron_port.core.dist.collectives import reduce_scatter_single
from megatron_port.core.dist.counter import key_of, random_bits
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import MeshDims
from megatron_port.core.dist.row_hashes import RowHashes, odd_ones
from megatron_port.core.io.logging import ranks_text
from megatron_port.core.optim.buckets import Bucket
from megatron_port.core.optim.state_watch import StateEntry, StateTensor
from megatron_port.ext.health.state_check import Change, Damage, damage_of

SUM_ROW = 512
"""Elements with one checksum: two numbers of 8 bytes are reduced for 2 KiB of gradients."""
_CHUNK = 1 << 22
"""Elements that are widened at a time: 32 MiB."""
_DEVIATIONS = 10.0
"""Bound of a random walk: by chance a row is that far off with probability 2e-22 (Hoeffding)."""
_LARGEST = 1e70
"""Sum of squares above which fp32 may overflow on its own."""
KIND = "reduced gradient"


class _Compared(NamedTuple):
    """One comparison of copies: what it was of, this rank's hashes, and which of them differ over the group."""

    group: dist.ProcessGroup
    tensors: list[StateTensor]
    hashes: torch.Tensor
    bad: torch.Tensor


class RowSums:
    """Signed sums and sums of squares of rows of ``SUM_ROW`` elements, float64 [parts, rows, 2]."""

    def __init__(self, device: torch.device) -> None:
        counter = torch.arange(SUM_ROW, dtype=torch.int64, device=device)
        self._signs = (random_bits(counter, key_of("gradient rows")) & 2).double() - 1.0

    @torch.no_grad()
    def __call__(self, flat: torch.Tensor, parts: int = 1) -> torch.Tensor:
        """Return those of a flat tensor of equal parts, each with rows of its own. Waits for nothing."""
        table = flat.view(parts, -1)
        whole, rest = divmod(table.shape[1], SUM_ROW)
        out = torch.zeros(parts, whole + bool(rest), 2, dtype=torch.float64, device=flat.device)
        body = table[:, : whole * SUM_ROW].unflatten(1, (whole, SUM_ROW))
        columns = max(1, min(whole, _CHUNK // SUM_ROW))
        lines = max(1, _CHUNK // (columns * SUM_ROW))
        for p in range(0, parts if whole else 0, lines):
            for c in range(0, whole, columns):
                self._add(body[p : p + lines, c : c + columns], out[p : p + lines, c : c + columns])
        if rest:
            self._add(table[:, None, whole * SUM_ROW :], out[:, whole:])
        return out

    def _add(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        wide = rows.double()
        out[..., 0] = wide @ self._signs[: rows.shape[-1]]
        out[..., 1] = torch.linalg.vector_norm(wide, dim=-1).square_()


class GradientCheck:
    """Checks of one rank's reduced gradients.

    Args:
        buckets: those that are trained.
        entries: by ``id`` of a bucket, where its parameters are in its ``sums``.
        dtype: of gradients between replicas.
        interval: steps between checks; 0: never.
        hashes: row hash function of a device.
        differing: counts rows and copies that differed in any check, an int64 scalar on the device; one that other
            checks add to as well spares each step a sum.
    """

    def __init__(
        self, buckets: Sequence[Bucket], entries: Mapping[int, Sequence[StateEntry]], ctx: ParallelContext, *,
        dtype: torch.dtype, interval: int, differing: torch.Tensor,
        hashes: Callable[[torch.device], RowHashes] = RowHashes,
    ) -> None:
        self._dtype, self._ctx, self.interval = dtype, ctx, interval
        self._hashes = hashes
        self.active = False
        """Whether this step is checked."""
        self.captured = False
        """Steps are captured and replayed: their reductions cannot be checked, copies can."""
        self.differing = differing
        self._tensors = {id(b): StateTensor(KIND, b.sums, entries[id(b)]) for b in buckets}
        self._copies = list(_copies(buckets, self._tensors, ctx))
        # What no other rank has part in is not reduced.
        self._watched = {id(b): b for b in buckets if b.group is not None or _summed_further(b, ctx)}
        self._steps = 0
        self._tools: tuple[RowHashes, RowSums] | None = None
        self._forget()

    def _forget(self) -> None:
        self._held: dict[int, torch.Tensor] = {}
        self._sums: dict[int, tuple[torch.Tensor, int]] = {}
        """By bucket: the rows' sums of what this rank gave, and how many reductions there were."""
        self._changes: list[Change] = []
        self._wrong: list[tuple[StateTensor, torch.Tensor]] = []
        self._compared: list[_Compared] = []

    def _tool(self) -> tuple[RowHashes, RowSums]:
        if self._tools is None:
            self._tools = self._hashes(self._ctx.device), RowSums(self._ctx.device)
        return self._tools

    def begin(self, *, early: bool) -> None:
        """Begin a step; ``early`` False: a replay, which changes nothing."""
        self.active = False
        if early and not self.captured and self._due():
            self.active = True
            self._forget()

    def _due(self) -> bool:
        self._steps += 1
        return self.interval > 0 and bool(self._watched) and self._steps % self.interval == 0

    # -- the sum -----------------------------------------------------------------------------------------------------

    def starting(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Take the rows' sums of gradients that are about to be reduced to shards."""
        if self.active and bucket.shards > 1:
            sums, count = self._sums.get(id(bucket), (None, 0))
            found = self._tool()[1](flat, bucket.shards)
            self._sums[id(bucket)] = (found if sums is None else sums.add_(found), count + 1)

    @torch.no_grad()
    def _check_sum(self, bucket: Bucket) -> None:
        """Compare the rows' sums of a bucket's shard with those of what its ranks gave. Collective over its group."""
        sums, count = self._sums.pop(id(bucket))
        given = torch.empty(sums.shape[1:], dtype=sums.dtype, device=sums.device)
        reduce_scatter_single(given.view(-1), sums.view(-1), group=bucket.group)
        signed, squares = given.unbind(-1)
        found = self._tool()[1](bucket.sums)[0, :, 0]
        known = signed.isfinite() & (squares < _LARGEST)
        if self._dtype.itemsize == 2:  # a narrow sum may overflow
            known &= found.isfinite()
        bad = known & ~((found - signed).abs() <= allowed(squares, count * bucket.shards, self._dtype))
        self.differing += bad.sum()
        self._wrong.append((self._tensors[id(bucket)], bad))

    # -- at rest -----------------------------------------------------------------------------------------------------

    def record(self, buckets: Sequence[Bucket]) -> None:
        """Hash reduced gradients that nobody may change until they are released."""
        if self.active:
            for bucket in buckets:
                if id(bucket) not in self._held and id(bucket) in self._watched:
                    self._held[id(bucket)] = self._tool()[0](bucket.sums)

    @torch.no_grad()
    def release(self, buckets: Sequence[Bucket]) -> None:
        """Compare held gradients with their hashes: something is to be added to them, or the update reads them."""
        for bucket in buckets if self.active else ():
            held = self._held.pop(id(bucket), None)
            if held is not None:
                found = self._tool()[0](bucket.sums)
                self.differing += (found != held).sum()
                self._changes.append(Change(self._tensors[id(bucket)], held, found))

    def reduced(self, buckets: Sequence[Bucket]) -> None:
        """Check the first sums of a step, all of which are complete, before any further ones."""
        if self.active:
            self.release([bucket for bucket in buckets if _summed_further(bucket, self._ctx)])
            for bucket in buckets:
                if id(bucket) in self._sums:
                    self._check_sum(bucket)

    # -- copies ------------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Release everything and compare copies over their groups: right before the update. Collective."""
        if self.active:
            self.release(list(self._watched.values()))
            self._compare_copies()
            self.active = False

    def verify_replayed(self) -> None:
        """Compare copies after the passes of a captured step. Collective."""
        if self.captured and self._due():
            self._forget()
            self._compare_copies()

    @torch.no_grad()
    def _compare_copies(self) -> None:
        known = {id(change.tensor): change.found for change in self._changes}
        for group, tensors in self._copies:
            rows = [known[id(t)] if id(t) in known else self._tool()[0](t.flat) for t in tensors]
            hashes = _folded(rows)
            both = torch.cat([hashes, ~hashes])
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
            most, least = both.chunk(2)
            bad = most != ~least
            self.differing += bad.sum()
            self._compared.append(_Compared(group, tensors, hashes, bad))

    # -- what was found ----------------------------------------------------------------------------------------------

    def damage(self) -> Damage | None:
        """Return what this rank has to say of the last step that was checked; None: nothing.

        Waits for the device. Where copies differ, collective over their group.
        """
        own = damage_of(self._changes, how="changed between its reduction and the update, though nothing was added")
        wrong = own or self._wrong_sum()
        apart = [self._apart(c, wrong is not None) for c in self._compared if bool(c.bad.any())]
        return wrong or next((damage for damage in apart if damage is not None), None)

    def _wrong_sum(self) -> Damage | None:
        for tensor, bad in self._wrong:
            rows = bad.nonzero().flatten().tolist()
            if rows:
                low, high = rows[0] * SUM_ROW, (rows[0] + 1) * SUM_ROW
                names = [e.name for e in tensor.entries if e.start < high and e.start + e.numel > low]
                return Damage(
                    KIND, (" or ".join(names) or "padding",), len(rows), row_bytes=SUM_ROW * tensor.flat.element_size(),
                    how="is not the sum of what the ranks of its replicas had",
                    cause="a bit flipped in this device's memory, or what came from other ranks was wrong. Where the "
                    "same rank is named again leave its host out, else check the network's error counters",
                )
        return None

    def _differing_names(self, group: dist.ProcessGroup, tensor: StateTensor) -> list[str]:
        """Return the parameters of a tensor whose gradients differ over a group by now; all, if none does. Collective.

        The update may have scaled them, on all ranks alike.
        """
        found = [self._tool()[0](tensor.flat[e.start : e.start + e.numel]) for e in tensor.entries]
        both = torch.cat([_folded(found), ~_folded(found)])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        most, least = both.chunk(2)
        names = [e.name for e, high, low in zip(tensor.entries, most.tolist(), least.tolist()) if high != ~low]
        return names or [e.name for e in tensor.entries]

    def _apart(self, compared: _Compared, own: bool) -> Damage | None:
        """Return the words of the rank that speaks for a group whose copies differ. Collective."""
        members = dist.get_process_group_ranks(compared.group)
        mine = torch.cat([compared.hashes[compared.bad], compared.hashes.new_tensor([int(own)])])
        gathered = [torch.empty_like(mine) for _ in members]
        dist.all_gather(gathered, mine, group=compared.group)
        hosts = gather_names(socket.gethostname(), group=compared.group, device=mine.device)
        first = compared.tensors[int(compared.bad.nonzero()[0])]
        names = self._differing_names(compared.group, first)
        values = [g.tolist() for g in gathered]
        if any(v[-1] for v in values):
            return None  # that rank knows more
        odd = odd_ones([v[0] for v in values])
        if members[odd[0]] != self._ctx.rank:
            return None
        at = [f"rank {members[i]} on {hosts[i]}" for i in odd]
        verdict = ", ".join(at[:8]) + (f" and {len(at) - 8} more" if len(at) > 8 else "")
        if 2 * (len(members) - len(odd)) <= len(members):
            verdict += f" and rank {members[0]} on {hosts[0]} differ, and no majority says who is wrong"
        shown = " or ".join(names[:4]) + (" or others" if len(names) > 4 else "")
        how = f"has other bits on some of {ranks_text(members)}, which summed it together"
        return Damage(
            KIND, (shown or "padding",), 1, how=how,
            cause=f"{verdict}: a bit flipped in a device's memory, or the sum came out otherwise there. Where the same "
            "rank is named again leave its host out",
        )


def _folded(hashes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one hash for each tensor's rows' hashes, int64."""
    return torch.stack([random_bits(h, torch.arange(len(h), dtype=torch.int64, device=h.device)).sum() for h in hashes])


def allowed(squares: torch.Tensor, summands: int, dtype: torch.dtype) -> torch.Tensor:
    """Return how far rounding may take rows' signed sums apart.

    Args:
        squares: sum of squares of all summands of a row, float64 [rows].
        summands: of an element.
        dtype: of the sums between ranks.
    """
    # By Higham and Mary (2019) an element's error is at most that of a random walk over its summands; with the bound of
    # a sum of magnitudes by one of squares, both square roots of the number of summands make the number.
    info, double = torch.finfo(dtype), torch.finfo(torch.float64)
    share = _DEVIATIONS * summands * info.eps / 2 + 2 * SUM_ROW**1.5 * double.eps
    least = SUM_ROW * summands * max(info.tiny * info.eps, torch.finfo(torch.float32).tiny)
    return squares.sqrt().mul(share).add(least)


def _summed_further(bucket: Bucket, ctx: ParallelContext) -> bool:
    """Return whether anything is added to a bucket's first sums."""
    plan = bucket.plan
    groups = [ctx.along(plan.copies), ctx.tied_group(plan.tied), *(ctx.along(part.dims) for part in plan.partial)]
    return any(group is not None for group in groups)


def _copies(
    buckets: Sequence[Bucket], tensors: Mapping[int, StateTensor], ctx: ParallelContext
) -> Iterator[tuple[dist.ProcessGroup, list[StateTensor]]]:
    """Yield each group that all-reduces gradients, with these, in an order that all members have."""
    ways: list[dict[tuple[str, ...], tuple[dist.ProcessGroup | None, list[StateTensor]]]] = [{}, {}, {}, {}]
    for bucket in buckets:
        plan, whole = bucket.plan, tensors[id(bucket)]
        uses = [(0, _key(plan.reduce_dims), bucket.group if plan.shards == 1 else None, whole),
                (1, _key(plan.copies), ctx.along(plan.copies), whole),
                (3, (str(plan.tied),), ctx.tied_group(plan.tied), whole)]
        uses += [(2, _key(part.dims), ctx.along(part.dims), t) for part in plan.partial
                 if (t := _part(bucket, whole, part.start, part.stop)) is not None]
        for way, key, group, tensor in uses:
            if group is not None:
                ways[way].setdefault(key, (group, []))[1].append(tensor)
    for alike in ways:
        for _, (group, found) in sorted(alike.items(), key=lambda item: item[0]):
            assert group is not None
            yield group, found


def _key(dims: MeshDims) -> tuple[str, ...]:
    return tuple(sorted(map(str, dims)))


def _part(bucket: Bucket, whole: StateTensor, start: int, stop: int) -> StateTensor | None:
    """Return the elements of a bucket from ``start`` to ``stop`` that this rank owns; None: it owns none."""
    begin, end = bucket.shard_slice.start, bucket.shard_slice.stop
    low, high = max(start, begin) - begin, min(stop, end) - begin
    if low >= high:
        return None
    inside = [e for e in whole.entries if e.start < high and e.start + e.numel > low]
    return StateTensor(KIND, whole.flat[low:high], [e._replace(start=e.start - low) for e in inside])
