"""lm-eval-harness on the quick start's model, offline: two tasks of text that it was not trained on.

    make quickstart && .venv/bin/pip install lm-eval
    python benchmarks/lm_eval_holdout.py --run runs/quickstart --out benchmarks/results/lm-eval-quickstart.json

The rows come from the test part of the run's corpus (``data.split``), the tasks are configs/tasks/holdout_*.yaml:
a line among three with two letters exchanged, the next line out of four (``acc``, chance 0.25), and perplexity.
Asked of ours in one process and with tensor and pipeline parallelism, and, as a judge that nobody here wrote, of the
harness' own ``hf`` model on the exported folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron_port.core.config.loader import load
from megatron_port.core.data.dataset import split_positions
from megatron_port.core.data.indexed import IndexedDataset
from megatron_port.core.io.files import write_bytes
from megatron_port.ext.corpora.tokenizer import get_tokenizer
from megatron_port.run.sources import commit

ROOT = Path(__file__).resolve().parent.parent
TASKS = ("holdout_spelling", "holdout_lines", "holdout_text")
ROWS = Path("data") / "tasks"
CONTEXT = 100
"""Characters before the line: the quick start's model sees 128 bytes."""
LAYOUTS = {"tp2 pp2": ["--nproc", "4", "--set", "layout.tensor_parallel_size=2", "--set",
                       "layout.pipeline_parallel_size=2", "--set", "engine=native"]}


def held_out(run: str) -> list[str]:
    """The documents of the test part, in their order."""
    config = load(run).config
    corpus = IndexedDataset(config.data.train[0])
    first, stop = split_positions(corpus, config.data.split, config.model.seq_length)[2]
    tokenizer = get_tokenizer(config.data.tokenizer)
    starts = [corpus.document_start(i) for i in range(corpus.num_documents)]
    return [tokenizer.decode(corpus.document(i).tolist()) for i, at in enumerate(starts) if first <= at < stop]


def spots(documents: list[str]) -> list[tuple[str, str]]:
    """(what stands before a line, the line) wherever there is enough of both."""
    found = []
    for text in documents:
        at = 0
        for line in text.splitlines(keepends=True):
            bare = line.rstrip("\n")
            if at >= CONTEXT and 25 <= len(bare) <= 60 and bare.strip() == bare:
                found.append((text[at - CONTEXT : at], bare))
            at += len(line)
    return found


def question(context: str, right: str, wrong: list[str], r: random.Random) -> dict[str, Any]:
    """A row, its choices in any order."""
    choices = [right, *wrong]
    r.shuffle(choices)
    return {"context": context, "choices": choices, "gold": choices.index(right)}


def next_lines(places: list[tuple[str, str]], count: int, seed: int) -> list[dict[str, Any]]:
    """The line that follows, and three of other places whose lengths are within a fifth of its own."""
    r, rows = random.Random(seed), []
    for context, right in r.sample(places, min(count, len(places))):
        near = sorted({s for _, s in places if s != right and 5 * abs(len(s) - len(right)) <= len(right)})
        rows.append(question(context, right, r.sample(near, 3), r))
    return rows


def spellings(places: list[tuple[str, str]], count: int, seed: int) -> list[dict[str, Any]]:
    """The line that follows, and three times itself with two neighbouring letters of one word exchanged."""
    r, rows = random.Random(seed), []
    for context, right in r.sample(places, min(count, len(places))):
        pairs = [m.start() for m in re.finditer(r"(?<=[a-z])(?=([a-z])([a-z]))", right) if m[1] != m[2]]
        wrong = [right[:i] + right[i + 1] + right[i] + right[i + 2 :] for i in r.sample(pairs, min(3, len(pairs)))]
        if len(wrong) == 3:
            rows.append(question(context, right, wrong, r))
    return rows


def make_rows(run: str, count: int, seed: int) -> dict[str, int]:
    """Write the files of rows; how many each has."""
    documents = held_out(run)
    places = spots(documents)
    made = {
        "holdout_spelling": spellings(places, count, seed), "holdout_lines": next_lines(places, count, seed),
        "holdout_text": [{"text": t} for t in documents],
    }
    ROWS.mkdir(parents=True, exist_ok=True)
    for name, rows in made.items():
        write_bytes(ROWS / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    return {name: len(rows) for name, rows in made.items()}


def offline() -> dict[str, str]:
    """The environment, with every way to the hub closed."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def ours(source: str, options: list[str], scratch: Path) -> dict[str, Any]:
    """``megatron-port evaluate``; the harness' results by task."""
    out = scratch / "ours.json"
    command = [sys.executable, "-m", "megatron_port", "evaluate", source, "--tasks", ",".join(TASKS), "--include-path",
               "configs/tasks", "--micro-batch-size", "8", "--json", str(out), *options]
    subprocess.run(command, check=True, env=offline())
    return numbers(json.loads(out.read_text())["results"])


def theirs(source: str, scratch: Path) -> dict[str, Any]:
    """The harness' own model class on what ``checkpoint export`` wrote."""
    last = max(Path(source, "checkpoints").glob("step-*"))
    folder = scratch / "exported"
    export = [sys.executable, "-m", "megatron_port", "checkpoint", "export", str(last), str(folder), "--to", "hf"]
    subprocess.run(export, check=True, env=offline())
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args",
               f"pretrained={folder},dtype=float32,max_length=128", "--tasks", ",".join(TASKS), "--include_path",
               "configs/tasks", "--batch_size", "8", "--device", "cpu", "--output_path", str(scratch / "theirs")]
    subprocess.run(command, check=True, env=offline())
    return numbers(json.loads(next((scratch / "theirs").rglob("results_*.json")).read_text())["results"])


def numbers(results: dict[str, Any]) -> dict[str, Any]:
    """Its figures without the words."""
    return {task: {k: v for k, v in found.items() if isinstance(v, float)} for task, found in results.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="runs/quickstart", help="the run folder")
    parser.add_argument("--config", default="runs/quickstart", help="its run file, which names corpus and split")
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows-only", action="store_true", help="write data/tasks/*.jsonl and stop")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = make_rows(args.config, args.questions, args.seed)
    print(f"{ROWS}: {rows}")
    if args.rows_only:
        return 0
    import lm_eval

    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        found = {"one process": ours(args.run, [], scratch)}
        found |= {layout: ours(args.run, options, scratch) for layout, options in LAYOUTS.items()}
        found["the harness' hf model on the export"] = theirs(args.run, scratch)
    row = {
        "command": "python " + " ".join(sys.argv), "commit": commit(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "lm_eval": lm_eval.__version__, "rows": rows,
        "chance": {"acc": 0.25}, "results": found,
    }
    print(json.dumps(row, indent=1))
    if args.out:
        write_bytes(args.out, (json.dumps(row, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
