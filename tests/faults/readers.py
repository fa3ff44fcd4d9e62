"""Fuzzing of everything that reads a file: manifests, shards, corpora, run files.

Each input is a valid file with seeded damage. A reader may accept it or raise a PortError; anything else is a finding:
another exception, a crash of the process, more memory than an input of its size can ask for, or seconds of CPU.
Readers run in a child under RLIMIT_AS, which counts are thus tested against. Hashes are fixed after the damage, so
that the checks behind them are reached. Run many with ``python tests/faults/readers.py --count 10000 --out FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutations import damage_bytes, damage_json, damage_numbers, damage_toml, hostile_value, json_text

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("manifest", "shard", "index", "run_file")
SPARE_BYTES = 512 << 20
"""Address space beyond what the child has when it starts."""
PEAK_BYTES = 128 << 20
"""Resident memory that one input may cost."""
CPU_S = 2.0
SILENCE_S = 60.0
"""A child that says nothing for so long is stuck outside of Python."""


class _Slow(BaseException):
    """Out of CPU time."""


# ---------------------------------------------------------------- valid files


class Corpus:
    """One valid file of each kind, made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checkpoint()
        self._index()
        self.run_files = [p.read_text() for p in sorted((ROOT / "configs" / "runs").glob("*.toml"))]
        from small_runs import RUN_FILE

        self.run_files += [RUN_FILE] * 3

    def _checkpoint(self) -> None:
        import torch

        from megatron_port.core.checkpoint.format import SavedState
        from megatron_port.core.checkpoint.writer import save_checkpoint
        from megatron_port.core.dist.record import StatePiece

        tensors = {"layers.0.weight": torch.arange(48.0).reshape(6, 8), "layers.1.bias": torch.ones(5)}
        pieces = []
        for kind in ("weight", "exp_avg"):
            for name, t in tensors.items():
                half = t.numel() // 2
                for start, stop in ((0, half), (half, t.numel())):
                    pieces.append(StatePiece(
                        name, kind, tuple(t.shape), (0,) * t.dim(), tuple(t.shape), start, t.reshape(-1)[start:stop]
                    ))
        state = SavedState(
            step=3, samples=12, tokens=384, layout={"tensor_parallel_size": 1}, config={"model": {"num_layers": 1}},
            scalars={"optimizer_steps": 3, "loss_scale": 1.0}, extra={"skipped_total": 0, "tokenizer": "byte"},
        )
        self.checkpoint = save_checkpoint(self.folder / "checkpoints", state, pieces)
        self.manifest = (self.checkpoint / "manifest.json").read_bytes()
        self.shard_name = next(p.name for p in self.checkpoint.iterdir() if p.suffix == ".safetensors")
        self.shard = (self.checkpoint / self.shard_name).read_bytes()

    def _index(self) -> None:
        from megatron_port.core.data.indexed import CorpusMeta
        from megatron_port.ext.corpora.writer import IndexedWriter

        self.prefix = self.folder / "corpus"
        with IndexedWriter(self.prefix, vocab_size=300) as writer:
            r = random.Random(0)
            for length in (3, 0, 40, 7, 1, 100, 12):
                writer.add_document([r.randrange(300) for _ in range(length)])
            writer.describe(CorpusMeta(tokenizer="byte", vocab_size=300, eod_id=256))
        self.idx, self.bin = Path(f"{self.prefix}.idx").read_bytes(), Path(f"{self.prefix}.bin").read_bytes()
        self.meta = json.loads(Path(f"{self.prefix}.meta.json").read_text())


# ---------------------------------------------------------------- one input each


def _with_hash(body: Any, r: random.Random) -> bytes:
    """A manifest of this body whose own hash is right (unless keys are doubled)."""
    import xxhash

    plain = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = xxhash.xxh3_128_hexdigest(plain.encode("utf-8", "surrogatepass"))
    text = json_text({"hash": digest, "manifest": body}, r)
    return text.encode("utf-8", "surrogatepass")


def _read_checkpoint(path: Path) -> None:
    from megatron_port.core.checkpoint.reader import checkpoints_in, open_checkpoint

    checkpoints_in(path.parent)
    checkpoint = open_checkpoint(path)
    for kind in checkpoint.kinds():
        for name in checkpoint.names(kind):
            shape = checkpoint.shape(name, kind)
            checkpoint.read(name, kind, (0,) * len(shape), shape)
    checkpoint.verify()


def fuzz_manifest(corpus: Corpus, r: random.Random) -> None:
    """The manifest, as bytes or as a document with a fixed hash."""
    if r.random() < 0.25:
        data = damage_bytes(corpus.manifest, r)
    else:
        body = json.loads(corpus.manifest)["manifest"]
        at = r.choice((body, body, body["pieces"], body["files"]))
        damaged = damage_json(at, r)
        if at is body:
            body = damaged
        else:
            body["pieces" if at is body["pieces"] else "files"] = damaged
        data = _with_hash(body, r)
    (corpus.checkpoint / "manifest.json").write_bytes(data)
    (corpus.checkpoint / corpus.shard_name).write_bytes(corpus.shard)
    _read_checkpoint(corpus.checkpoint)


def fuzz_shard(corpus: Corpus, r: random.Random) -> None:
    """A safetensors file whose size and hashes in the manifest are those of the damaged file."""
    import xxhash

    size = int.from_bytes(corpus.shard[:8], "little")
    if r.random() < 0.4:
        data = damage_bytes(corpus.shard, r)
    else:
        header = damage_json(json.loads(corpus.shard[8 : 8 + size]), r)
        text = json_text(header, r).encode("utf-8", "surrogatepass")
        length = len(text) if r.random() < 0.9 else r.choice((0, 2**63, len(text) + 1, 100_000_001))
        data = length.to_bytes(8, "little") + text + corpus.shard[8 + size :]
    body = json.loads(corpus.manifest)["manifest"]
    entry = body["files"][corpus.shard_name]
    old = xxhash.xxh3_128_hexdigest(corpus.shard)
    # Wherever the manifest holds the file's hash, now or in a later version of the format.
    fixed = json.loads(json.dumps(entry).replace(old, xxhash.xxh3_128_hexdigest(data)))
    body["files"][corpus.shard_name] = {**fixed, "size": len(data)}
    (corpus.checkpoint / "manifest.json").write_bytes(_with_hash(body, random.Random(0)))
    (corpus.checkpoint / corpus.shard_name).write_bytes(data)
    _read_checkpoint(corpus.checkpoint)


def fuzz_index(corpus: Corpus, r: random.Random) -> None:
    """.idx, now and then .bin or the sidecar; then everything that reads it."""
    from megatron_port.core.data.indexed import IndexedDataset
    from megatron_port.ext.corpora.verify import verify

    which = r.choice(("idx", "idx", "idx", "idx", "bin", "meta"))
    idx = damage_bytes(corpus.idx, r) if which == "idx" else corpus.idx
    if which == "idx" and r.random() < 0.6:  # the size stays right: only what is in it is wrong
        body = bytearray(corpus.idx)
        at, width = r.choice([(34 + 4 * i, 4) for i in range(7)] + [(34 + 28 + 8 * i, 8) for i in range(15)])
        body[at : at + width] = (r.choice((0, 1, 2, 3, 5, 2**31, 2**62, 2**63, 2**64 - 1)) % (1 << 8 * width)).to_bytes(
            width, "little"
        )
        idx = bytes(body)
    meta = json_text(damage_json(corpus.meta, r), r) if which == "meta" else json.dumps(corpus.meta)
    if which == "meta" and r.random() < 0.1:
        meta = "[" * 100_000 if r.random() < 0.5 else json_text(hostile_value(r), r)
    Path(f"{corpus.prefix}.idx").write_bytes(idx)
    Path(f"{corpus.prefix}.bin").write_bytes(damage_bytes(corpus.bin, r) if which == "bin" else corpus.bin)
    Path(f"{corpus.prefix}.meta.json").write_bytes(meta.encode("utf-8", "surrogatepass"))
    dataset = IndexedDataset(corpus.prefix)
    dataset.read(0, min(dataset.num_tokens, 50))
    for index in range(min(dataset.num_documents, 20)):
        dataset.document(index)
    dataset.nearest_document(dataset.num_tokens // 2)
    _load(corpus.prefix)
    verify(corpus.prefix).raise_if_bad()


def _load(prefix: Path) -> None:
    """As training does, in both orders."""
    from megatron_port.core.config.loader import load
    from megatron_port.core.data.loader import build_loaders

    for order in ("stateless", "megatron"):
        config = load(None, [
            f"output_dir={prefix.parent}", f"data.train={json.dumps([str(prefix)])}", f"data.order={order}",
            "data.tokenizer=byte", "model.vocab_size=300", "model.seq_length=8", "data.split=[0.8, 0.1, 0.1]",
            "batch.global_batch_size=2", "batch.micro_batch_size=1",
        ]).config
        loaders = build_loaders(config, dp_rank=0, dp_size=1, need_tokens=True, need_labels=True, train_samples=20)
        for step in range(3):
            loaders.train.step(2 * step, 2)


def fuzz_run_file(corpus: Corpus, r: random.Random) -> None:
    """A run file or an override, read, checked and resolved."""
    from megatron_port.core.config.checks import check, resolve
    from megatron_port.core.config.loader import load

    path = corpus.folder / "run.toml"
    mild = r.random() < 0.3
    text = corpus.run_files[-1] if mild else r.choice(corpus.run_files)
    overrides = []
    if mild:  # only numbers are wrong: what the checks of whole configurations see
        path.write_text(damage_numbers(text, r))
    elif r.random() < 0.8:
        path.write_bytes(damage_toml(text, r))
    else:
        path.write_text(text)
        line = damage_toml("model.num_layers = 4\nlayout.pipeline_parallel_size = 2\nname = \"x\"", r)
        overrides = line.decode("utf-8", "replace").split("\n")[:3]
    config = load(path, overrides).config
    world = r.choice((1, 4, 6, 3072))
    check(config, world_size=world)
    resolve(config, world)


FUZZ: dict[str, Callable[[Corpus, random.Random], None]] = {
    "manifest": fuzz_manifest, "shard": fuzz_shard, "index": fuzz_index, "run_file": fuzz_run_file,
}


# ---------------------------------------------------------------- the child


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def _judge_one(corpus: Corpus, target: str, seed: int) -> dict[str, Any]:
    """What became of one input."""
    from megatron_port.core.errors import PortError

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, started = _memory("VmHWM"), time.process_time()
    result, detail = "read", ""
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        FUZZ[target](corpus, random.Random(f"{target}-{seed}"))
    except PortError as error:
        result, detail = "refused", str(error)
        if not detail or len(detail) > 20_000:
            result = f"a message of {len(detail)} characters"
    except BaseException as error:  # pyo3's panics are no Exceptions
        result = "out of CPU time" if isinstance(error, _Slow) else f"{type(error).__name__}: {str(error)[:200]}"
        detail = "".join(traceback.format_exception(error)[-3:])[-1500:]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    peak = _memory("VmHWM") - before
    if result in ("read", "refused") and peak > PEAK_BYTES:
        result = f"{peak >> 20} MiB of memory"
    ok = result in ("read", "refused")
    return {
        "target": target, "seed": seed, "result": result, "ok": ok, "peak_kib": peak >> 10,
        "seconds": round(time.process_time() - started, 4), **({} if ok else {"detail": detail}),
    }


def child(target: str, seeds: range, folder: Path) -> None:
    """Read inputs one after the other; a line of JSON each on standard output."""
    corpus = Corpus(folder)

    def slow(number: int, frame: Any) -> None:
        raise _Slow

    signal.signal(signal.SIGVTALRM, slow)
    limit = _memory("VmSize") + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for seed in seeds:
        print(json.dumps({"begin": seed}), flush=True)
        print(json.dumps(_judge_one(corpus, target, seed)), flush=True)


def fuzz(target: str, seeds: range) -> Iterator[dict[str, Any]]:
    """The outcome of every seed. A child that dies is a finding, and another continues after it."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    while seeds:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, open(Path(folder) / "stderr", "wb") as errors:
            process = subprocess.Popen(
                [sys.executable, __file__, "--child", target, str(seeds.start), str(seeds.stop), folder],
                stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=ROOT,
            )
            begun, buffer = None, b""
            assert process.stdout is not None
            while select.select([process.stdout], [], [], SILENCE_S)[0] and (
                data := os.read(process.stdout.fileno(), 1 << 16)
            ):
                *lines, buffer = (buffer + data).split(b"\n")
                for line in map(json.loads, lines):
                    if "begin" in line:
                        begun = line["begin"]
                    else:
                        yield line
                        seeds, begun = range(line["seed"] + 1, seeds.stop), None
            silent = process.poll() is None and process.stdout not in select.select([process.stdout], [], [], 0)[0]
            process.kill()
            code = process.wait()
            process.stdout.close()
            if not seeds:
                return
            text = (Path(folder) / "stderr").read_text(errors="replace")[-1500:]
        if begun is None:
            raise RuntimeError(f"the child for {target} ended ({code}) before its first input\n{text}")
        result = "stuck" if silent else f"the process died, {code}"
        yield {"target": target, "seed": begun, "result": result, "ok": False, "detail": text}
        seeds = range(begun + 1, seeds.stop)


def main() -> int:
    """Fuzz all readers with as many inputs each; append one line per batch of 500 and per finding to a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="inputs in total")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        target, first, last, folder = args.child
        child(target, range(int(first), int(last)), Path(folder))
        return 0
    targets = args.target or TARGETS
    each, bad = args.count // len(targets), 0
    for target in targets:
        for first in range(args.first, args.first + each, 500):
            seeds = range(first, min(first + 500, args.first + each))
            done = [json.loads(x) for x in args.out.read_text().splitlines()] if args.out and args.out.exists() else []
            if any(d.get("target") == target and d.get("seeds") == [seeds.start, seeds.stop - 1] for d in done):
                continue
            rows = list(fuzz(target, seeds))
            findings = [row for row in rows if not row["ok"]]
            bad += len(findings)
            summary = {
                "part": "fuzz", "target": target, "seeds": [seeds.start, seeds.stop - 1], "inputs": len(rows),
                "read": sum(row["result"] == "read" for row in rows),
                "refused": sum(row["result"] == "refused" for row in rows), "findings": len(findings),
                "longest_s": max(row.get("seconds", 0.0) for row in rows),
                "peak_kib": max(row.get("peak_kib", 0) for row in rows), "ok": not findings,
            }
            for row in [*findings, summary]:
                print(json.dumps(row) if "detail" not in row else f"{row}", flush=True)
                if args.out:
                    with args.out.open("a") as stream:
                        stream.write(json.dumps(row) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
