"""Tokens a second of ``data prepare`` beside tiktoken's own encoding of the same documents: one core, then all.

    python benchmarks/data_throughput.py [--megabytes 40] [--repeats 3]

The text is a real corpus (``data fetch``; ``--text`` for another one), repeated to the size asked for, as JSON lines.
tiktoken's own time is ``encode_ordinary`` over the documents, already decoded and in memory; ``prepare`` also reads,
parses, converts, hashes and writes. CPU time of the children is compared too: wall time depends on who else is there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

from megatron_port.ext.corpora.fetch import fetch
from megatron_port.ext.corpora.prepare import prepare
from megatron_port.ext.corpora.tokenizer import get_tokenizer


def cpu() -> float:
    """Seconds of this process and its ended children."""
    mine, theirs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return mine.ru_utime + mine.ru_stime + theirs.ru_utime + theirs.ru_stime


def make(text: Path, out: Path, size: int) -> list[str]:
    """JSON lines of documents of 1 to 20 kB, ``size`` bytes of text in all."""
    whole = "".join(p.read_text(encoding="utf-8") for p in sorted(text.rglob("*.txt")))
    documents, at, total = [], 0, 0
    while total < size:
        length = 1000 + (len(documents) * 7919) % 19000
        documents.append(whole[at:at + length])
        total += len(documents[-1])
        at = at + length if at + length < len(whole) else 0
    out.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    return documents


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--text", type=Path)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    tokenizer = get_tokenizer("gpt2")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = args.text or fetch(folder / "corpus").path
        documents = make(text, folder / "in.jsonl", int(args.megabytes * 1e6))
        size = sum(len(d.encode()) for d in documents) / 1e6
        best: dict[str, tuple[float, float]] = {}
        tokens = 0
        for _ in range(args.repeats):
            for label, workers in (("tiktoken", 0), ("prepare, 1 worker", 1), (f"prepare, {cores} workers", cores)):
                wall, used = time.perf_counter(), cpu()
                if workers:
                    tokens = prepare([folder / "in.jsonl"], folder / "c", tokenizer=tokenizer, workers=workers).tokens
                else:
                    for document in documents:
                        tokenizer.encode(document)
                seconds = time.perf_counter() - wall, cpu() - used
                old = best.get(label, (9e9, 9e9))
                best[label] = min(old[0], seconds[0]), min(old[1], seconds[1])
        own = best["tiktoken"]
        print(f"{size:.1f} MB, {len(documents)} documents, {tokens} tokens, best of {args.repeats}")
        for label, (wall, used) in best.items():
            print(f"{label:20} {size / wall:6.2f} MB/s wall ({own[0] / wall:.2f} x)   "
                  f"{size / used:6.2f} MB per CPU second ({own[1] / used:.2f} x)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
