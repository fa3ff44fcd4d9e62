"""Damage to checkpoints, drawn from a seed, and the start of a run that must find it and fall back.

``python tests/faults/corruption.py --count 300 --out FILE`` writes a line a case; test_corruption.py runs the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash

from megatron_port.core.checkpoint.format import SavedState, shard_name
from megatron_port.core.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.core.checkpoint.shard import Digest, bytes_of, plan_shard
from megatron_port.core.checkpoint.writer import Committer, commit, prepare, write_part
from megatron_port.core.config.dump import as_dict
from megatron_port.core.config.schema import BackendConfig, CheckpointConfig, LayoutConfig, ModelConfig, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.engine.api import Engine
from megatron_port.core.errors import DamagedCheckpoint
from megatron_port.core.layers.providers import torch_providers
from megatron_port.run import loading, state
from megatron_port.run.build import build_engine

RANKS = 4
GOOD, BAD = 10, 20


def make_config(folder: Path) -> RunConfig:
    return RunConfig(
        name="run", output_dir=str(folder), engine="native",
        model=ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=53, seq_length=16),
        layout=LayoutConfig(vocab_padding_multiple=1, zero_stage=0, data_parallel_size=1),
        backend=BackendConfig(device="cpu", attention="math", own_kernels="off"),
        checkpoint=CheckpointConfig(keep=0),
    )


class CheckpointCase:
    """A run folder with two checkpoints, each of RANKS files, and an engine that starts from it."""

    def __init__(self, folder: Path) -> None:
        self.config = make_config(folder)
        self.ctx = ParallelContext.create(Topology(), "cpu")
        self.engine: Engine = build_engine(self.config, self.ctx, torch_providers(), initialise=True)
        self.home = state.run_folder(self.config) / state.FOLDER  # type: ignore[attr-defined]
        self.truth: dict[int, dict[tuple[str, str, int], torch.Tensor]] = {}
        for step in (GOOD, BAD):
            self._randomise(step)
            self.truth[step] = self.held()
            self._save(step)
        self.pristine = folder / "pristine"
        shutil.copytree(self.home, self.pristine)
        self.lines: list[str] = []
        self.session: Any = SimpleNamespace(
            config=self.config, ctx=self.ctx, cpu_group=None, info=SimpleNamespace(world_size=1, rank=0),
            is_rank_zero=True,
            logger=SimpleNamespace(log=self.lines.append),
        )

    def held(self) -> dict[tuple[str, str, int], torch.Tensor]:
        return {(p.name, p.kind, p.flat_start): p.tensor.clone() for p in self.engine.state_pieces()}

    def _randomise(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)

        def read(
            name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *, out: torch.Tensor | None = None
        ) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.engine.load_state(read, {"optimizer_steps": step})

    def _save(self, step: int) -> None:
        """As RANKS ranks would, one after the other."""
        saved = SavedState(
            step=step, samples=8 * step, tokens=128 * step, layout=self.config.layout, config=as_dict(self.config),
            scalars=self.engine.scalar_state(), extra={},
        )
        final = self.home / f"step-{step:08d}"
        work = final.with_name(final.name + ".tmp")
        prepare(self.home, work, saved, Committer())
        pieces = list(self.engine.state_pieces())
        for rank in range(RANKS):
            plan = plan_shard(shard_name(rank), pieces[rank::RANKS])
            write_part(rank, work, plan, (bytes_of(p.tensor) for p in plan.pieces), verify=True)
        commit(work, final, saved, RANKS, None, Committer())

    @property
    def bad(self) -> Path:
        return self.home / f"step-{BAD:08d}"

    @property
    def good(self) -> Path:
        return self.home / f"step-{GOOD:08d}"

    def restore(self) -> None:
        """Both checkpoints as they were saved; what this process learnt of them is forgotten with their objects."""
        shutil.rmtree(self.home)
        shutil.copytree(self.pristine, self.home)

    def cut_blocks(self, width: int) -> None:
        """List the newer checkpoint's blocks anew, ``width`` bytes each, so that its small files have many."""
        path = self.bad / "manifest.json"
        body = json.loads(path.read_text())["manifest"]
        for name in body["files"]:
            digest = Digest(width)
            digest.update((self.bad / name).read_bytes())
            body["files"][name] = vars(digest.entry())
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        path.write_text(json.dumps({"hash": xxhash.xxh3_128_hexdigest(text.encode()), "manifest": json.loads(text)}))


@dataclass(frozen=True)
class Damage:
    """What was done, and what a message must name."""

    kind: str
    file: str
    names: tuple[str, ...]
    """Any one of these texts."""
    detail: str = ""


# ---------------------------------------------------------------- kinds of damage


def tensors_in(place: CheckpointCase, file: str, start: int, stop: int) -> tuple[str, ...]:
    """Names of what lies in a byte range of a file of the newer checkpoint, in the words of a message."""
    return tuple(o[0] for o in open_checkpoint(place.pristine / place.bad.name)._layout(file, start, stop))


def header_bytes(path: Path) -> int:
    with open(path, "rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def _flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _shard(draw: random.Random, place: CheckpointCase) -> Path:
    return place.bad / shard_name(draw.randrange(RANKS))


def flip_data(draw: random.Random, place: CheckpointCase) -> Damage:
    path = _shard(draw, place)
    byte = draw.randrange(header_bytes(path), path.stat().st_size)
    _flip(path, 8 * byte + draw.randrange(8))
    return Damage("bit flip in data", path.name, tensors_in(place, path.name, byte, byte + 1), f"byte {byte}")


def flip_header(draw: random.Random, place: CheckpointCase) -> Damage:
    path = _shard(draw, place)
    byte = draw.randrange(header_bytes(path))
    _flip(path, 8 * byte + draw.randrange(8))
    return Damage("bit flip in header", path.name, ("the header (all tensors)",), f"byte {byte}")


def flip_manifest(draw: random.Random, place: CheckpointCase) -> Damage:
    path = place.bad / "manifest.json"
    good = path.read_bytes()
    body = json.loads(good)
    while True:
        bit = draw.randrange(8 * len(good))
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            harmless = json.loads(bytes(bad)) == body  # white space for white space: the content is what it was
        except ValueError:
            harmless = False
        if not harmless:
            break
    path.write_bytes(bad)
    return Damage("bit flip in manifest", path.name, ("",), f"bit {bit}")


def truncate(draw: random.Random, place: CheckpointCase) -> Damage:
    path = draw.choice([_shard(draw, place), place.bad / "manifest.json"])
    size = draw.randrange(path.stat().st_size - 1)
    os.truncate(path, size)
    names = ("",) if path.name == "manifest.json" else ("weight of", "exp_avg of", "exp_avg_sq of")
    return Damage("truncation", path.name, names, f"to {size} bytes")


def delete(draw: random.Random, place: CheckpointCase) -> Damage:
    path = draw.choice([_shard(draw, place), _shard(draw, place), place.bad / "manifest.json"])
    path.unlink()
    names = ("",) if path.name == "manifest.json" else ("weight of", "exp_avg of", "exp_avg_sq of")
    return Damage("deletion", path.name, names)


def swap_files(draw: random.Random, place: CheckpointCase) -> Damage:
    a, b = draw.sample(range(RANKS), 2)
    one, two, aside = place.bad / shard_name(a), place.bad / shard_name(b), place.bad / "aside"
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    return Damage("swapped files", "rank-0000", ("weight of", "exp_avg of", "exp_avg_sq of"), f"{a} and {b}")


def old_shard(draw: random.Random, place: CheckpointCase) -> Damage:
    path = _shard(draw, place)
    shutil.copyfile(place.good / path.name, path)
    return Damage("old shard, new manifest", path.name, ("weight of", "exp_avg of", "exp_avg_sq of"))


def old_manifest(draw: random.Random, place: CheckpointCase) -> Damage:
    shutil.copyfile(place.good / "manifest.json", place.bad / "manifest.json")
    return Damage("old manifest, new shards", place.bad.name, ("",))


def zero_block(draw: random.Random, place: CheckpointCase) -> Damage:
    path = _shard(draw, place)
    data = bytearray(path.read_bytes())
    base = header_bytes(path)
    size = min(draw.choice([512, 4096]), len(data) - base)  # a sector, a page
    start = draw.randrange(base, len(data) - size + 1)
    data[start : start + size] = bytes(size)
    path.write_bytes(data)
    return Damage("zeroed block", path.name, tensors_in(place, path.name, start, start + size), f"{start} + {size}")


def garbage_block(draw: random.Random, place: CheckpointCase) -> Damage:
    path = _shard(draw, place)
    data = bytearray(path.read_bytes())
    base = header_bytes(path)
    start = draw.randrange(base, len(data) - 512)
    data[start : start + 512] = draw.randbytes(512)
    path.write_bytes(data)
    return Damage("garbage block", path.name, tensors_in(place, path.name, start, start + 512), f"{start}")


KINDS: tuple[Callable[[random.Random, CheckpointCase], Damage], ...] = (
    flip_data, flip_header, flip_manifest, truncate, delete, swap_files, old_shard, zero_block, old_manifest,
    garbage_block,
)


# ---------------------------------------------------------------- the start of a run


@contextmanager
def watched(place: CheckpointCase, served: list[str]) -> Iterator[None]:
    """Compare every tensor that a checkpoint hands out with what was saved; damaged ones must never come out."""
    real = Checkpoint.read

    def read(
        self: Checkpoint, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        got = real(self, name, kind, offset, shape, out=out)
        want = place.truth[int(self.path.name[5:])][name, kind, 0]
        if not torch.equal(got.reshape(-1), want):
            served.append(f"{kind} of {name} of {self.path.name}")
        return got

    Checkpoint.read = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        Checkpoint.read = real  # type: ignore[method-assign]


def one_case(place: CheckpointCase, seed: int) -> dict[str, Any]:
    """Damage the newer checkpoint and start; what was seen. ``fault``: empty if all was as it must be."""
    draw = random.Random(seed)
    place.restore()
    width = draw.choice([0, 1 << 10, 1 << 14])
    if width:
        place.cut_blocks(width)
    damage = KINDS[seed % len(KINDS)](draw, place)
    place.lines.clear()
    place._randomise(seed + 1000)
    served: list[str] = []
    began = time.perf_counter()
    with watched(place, served):
        loaded = loading.load_first_whole(place.engine, state.find_checkpoints(place.session), place.session)
    seconds = time.perf_counter() - began
    said = " ".join(place.lines)
    faults = []
    if loaded.path != place.good:
        faults.append(f"started from {loaded.path.name}")
    if served:
        faults.append(f"wrong numbers came out: {served[:3]}")
    if damage.file not in said or place.bad.name not in said:
        faults.append("the file is not named")
    if not any(name in said for name in damage.names):
        faults.append(f"none of {damage.names} is named")
    if not ("falling back" in said or "passing over" in said):
        faults.append("not announced")
    held = place.held()
    if any(not torch.equal(held[k], t) for k, t in place.truth[GOOD].items()) or len(held) != len(place.truth[GOOD]):
        faults.append("the state is not that of the good step")
    found = True
    try:
        open_checkpoint(place.bad).verify()
        found = False
    except DamagedCheckpoint:
        pass
    if not found:
        faults.append("verify calls it whole")
    loaded.close()
    return {
        "seed": seed, "kind": damage.kind, "file": damage.file, "detail": damage.detail, "block_bytes": width or None,
        "found": not faults, "ok": not faults, "fault": "; ".join(faults),
        "said": said[:400].replace(str(place.home), "..."),
        "seconds": round(seconds, 4),
    }


def campaign(folder: Path, seeds: range) -> list[dict[str, Any]]:
    """A line for each seed."""
    place = CheckpointCase(folder)
    return [one_case(place, seed) for seed in seeds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = campaign(Path(folder), range(args.count))
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    missed = [row for row in rows if not row["found"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} corruptions found, named and passed over: {args.out}")
    for row in missed:
        print(row)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
