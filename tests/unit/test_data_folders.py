"""Mixed folders: each token of each file is in the corpus or in a file that is named as skipped, and once."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import random
import tarfile
import zipfile
from collections import Counter

import numpy as np
import pytest

from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.prepare import prepare
from megatron_port.ext.corpora.source_files import ReadOptions
from megatron_port.ext.corpora.tokenizer import ByteTokenizer

pyarrow = pytest.importorskip("pyarrow")
zstandard = pytest.importorskip("zstandard")
PACK = {"": bytes, ".gz": gzip.compress, ".GZ": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
        ".zst": zstandard.ZstdCompressor().compress}
QUIET = {"binary", "empty", "hidden", "link"}
"""What may be left out without a word of the user's."""


def words(r):
    return " ".join(r.choice(["alpha", "é", "日本", '"quoted"', "a,b", "x\ty", "two\nlines", "{", "[1]", "id"])
                    for _ in range(r.randrange(1, 12))) + f" {r.randrange(10**9)}"


def json_lines(texts):
    rows = (json.dumps({"id": i, "text": t}, ensure_ascii=i % 2 > 0) for i, t in enumerate(texts))
    return "".join(row + "\n" for row in rows).encode()


def table(texts, delimiter):
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter).writerows([["id", "text"], *([i, t] for i, t in enumerate(texts))])
    return out.getvalue().encode()


def arrow(texts, kind):
    out = pyarrow.BufferOutputStream()
    rows = pyarrow.table({"text": texts})
    if kind == "parquet":
        import pyarrow.parquet as parquet

        parquet.write_table(rows, out)
    else:
        with (pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream)(out, rows.schema) as writer:
            writer.write_table(rows)
    return out.getvalue().to_pybytes()


def archive(texts, kind):
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w") as packed:
            packed.writestr("a.txt", "".join(texts))
    else:
        with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            tar.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return out.getvalue()


def records(texts, form):
    objects = [{"text": t} for t in texts]
    return {"array": lambda: json.dumps(objects), "pretty": lambda: json.dumps(objects, indent=2),
            "stream": lambda: "\n".join(json.dumps(o, indent=1) for o in objects)}[form]().encode()


MAKE = {
    # kind: (names, bytes of texts, may be compressed, must be read)
    "jsonl": ([".jsonl", ".JSONL", ".ndjson", ".json", ".Json", ""], json_lines, True, True),
    "array": ([".json", ""], lambda t: records(t, "array"), True, True),
    "pretty": ([".json", ".JSON"], lambda t: records(t, "pretty"), True, True),
    "stream": ([".json"], lambda t: records(t, "stream"), True, True),
    "csv": ([".csv", ".CSV"], lambda t: table(t, ","), True, True),
    "tsv": ([".tsv"], lambda t: table(t, "\t"), True, True),
    "parquet": ([".parquet", ".PARQUET", "", ".txt"], lambda t: arrow(t, "parquet"), False, True),
    "arrow": ([".arrow", ""], lambda t: arrow(t, "file"), False, True),
    "stream of arrow": ([".arrow", ""], lambda t: arrow(t, "stream"), False, True),
    "empty": (["", ".txt", ".jsonl"], lambda t: b"", False, False),
    "binary": (["", ".bin", ".png"], lambda t: bytes(range(256)) * 9, True, False),
    "jsonl as text": ([".txt", ".jsonl.txt"], json_lines, True, False),
    "csv as text": ([".txt", "", ".dat"], lambda t: table(t, ","), True, False),
    "zip": ([".zip", ".txt", ""], lambda t: archive(t, "zip"), False, False),
    "tar": ([".tar", ".jsonl", ".txt", ""], lambda t: archive(t, "tar"), True, False),
    "lfs": ([".parquet", ".jsonl"], lambda t: b"version https://git-lfs.github.com/spec/v1\n", False, False),
}
WHOLE = {  # a file is one document
    "text": ([".txt", ".TXT"], lambda t: t.encode(), True, True),
    "unknown": ([".md", "", ".log"], lambda t: t.encode(), True, False),
    "latin": ([".txt", ""], lambda t: (t + " café").encode("latin-1", "replace"), True, False),
    "utf-16": ([".txt", ".jsonl"], lambda t: t.encode("utf-16"), True, False),
    "utf-16 without a mark": ([".txt", ""], lambda t: ("plain words " + t).encode("utf-16-le"), False, False),
}


def grow(r, root, outside):
    """Fill a folder; (kind, texts) by path."""
    (root / "a.txt").write_text("always")
    truth = {root / "a.txt": ("text", ["always"])}
    folders = [root]
    for i in range(r.randrange(4)):
        folders.append(r.choice(folders) / r.choice([f"d{i}", f"D {i}", f".hidden{i}", "part"]))
        folders[-1].mkdir(exist_ok=True)
    outside.mkdir()
    folders.append(outside)
    for i in range(r.randrange(6, 14)):
        kind = r.choice([*MAKE, *WHOLE, "jsonl", "text", "csv"])
        names, make, packs, _ = MAKE.get(kind) or WHOLE[kind]
        texts = [words(r) for _ in range(r.randrange(1, 5) if kind in MAKE else 1)]
        packing = r.choice(list(PACK)) if packs and r.random() < 0.4 else ""
        name = f"{r.choice(['part-0000', 'x', 'Data.v1 '])}{i}{r.choice(names)}{packing}"
        path = r.choice(folders) / (f".{name}" if r.random() < 0.05 else name)
        path.write_bytes(PACK[packing](make(texts if kind in MAKE else texts[0])))
        truth[path] = kind, texts
    inside = [p for p in truth if outside not in p.parents]
    seen = [f for f in folders[:-1] if ".hidden" not in str(f)]
    os.symlink(outside, r.choice(seen) / "elsewhere")  # its files count, once
    for i, link in enumerate(["up", "again", "file", "hard"]):
        here = r.choice(folders[:-1])
        if link == "up":
            os.symlink(r.choice([root, here]), here / f"{link}{i}")
        elif link == "again":
            os.symlink(r.choice(folders), here / f"{link}{i}")
        elif inside:
            target = r.choice(inside)
            (os.symlink if link == "file" else os.link)(target, here / f"{link}-{target.name}")
    return truth


def prepared(root, prefix):
    """(result, files refused): each refusal is answered with ``skip``."""
    refused: set = set()
    while True:
        skip = tuple(os.path.relpath(path, root) for path in refused)
        try:
            return prepare([root], prefix, tokenizer=ByteTokenizer(), options=ReadOptions(skip=skip)), refused
        except DataError as error:
            named = paths_in(str(error), root)
            assert named - refused, str(error)
            refused |= named


def paths_in(message, root):
    known = [os.path.join(folder, name) for folder, _, names in os.walk(root, followlinks=False) for name in names]
    for folder, folders, _ in os.walk(root):
        for name in folders:
            if os.path.islink(os.path.join(folder, name)):
                known += [os.path.join(folder, name, inner) for inner in os.listdir(os.path.join(folder, name))]
    return {path for path in known if any(f"{path}{end}" in message for end in (":", " (", " at ", ","))}


@pytest.mark.parametrize("batch", range(10))
def test_every_token_is_read_or_named(tmp_path, batch):
    for seed in range(batch * 10, batch * 10 + 10):
        r = random.Random(seed)
        root = tmp_path / f"in{seed}"
        root.mkdir()
        truth = grow(r, root, tmp_path / f"outside{seed}")
        done, refused = prepared(root, tmp_path / "c")
        check(truth, root, done, refused, np.fromfile(tmp_path / "c.bin", "<u2"))


def check(truth, root, done, refused, ids):
    hidden = {p for p in truth if any(part.startswith(".") for part in (*p.relative_to(root.parent).parts,))}
    read_as = [source.path.relative_to(root.parent) for source in done.inputs.sources]
    assert not [path for path in read_as if any(part.startswith(".") for part in path.parts)]
    left, total = 0, 0
    expected: Counter = Counter()
    listed = [s.path for s in done.inputs.skipped if not s.reason.startswith(("the same", "link"))]
    named = {os.stat(file).st_ino for path in listed for file in (path, *path.rglob("*")) if file.exists()}
    for path, (kind, texts) in truth.items():
        tokens = sum(len(t.encode()) for t in texts)
        total += tokens
        skipped = not any(os.path.samefile(path, source.path) for source in done.inputs.sources)
        left += tokens if skipped else 0
        assert not skipped or path.stat().st_ino in named, (path, kind)
        must = (MAKE.get(kind) or WHOLE[kind])[3]
        assert skipped != must or path in hidden, (path, kind)
        asked = any(os.path.samefile(path, other) for other in refused)
        assert not skipped or asked or path in hidden or kind in QUIET, (path, kind)
        expected.update([] if skipped else texts)
    assert int((ids != 256).sum()) + left == total
    documents, start = Counter(), 0
    for end in np.flatnonzero(ids == 256).tolist():
        documents[bytes(ids[start:end].astype("u1")).decode()] += 1
        start = end + 1
    assert documents == expected
