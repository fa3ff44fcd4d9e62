"""A run whose corpus and copies of checkpoints lie in a bucket: the local run's losses, though the server dies."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")

from megatron_port.core.data.indexed import CorpusMeta  # noqa: E402
from megatron_port.ext.corpora.writer import IndexedWriter  # noqa: E402

if TYPE_CHECKING:
    from commands import Commands

STEPS, MEGABYTES = 20, 16
RUN = """
engine = "native"
[model]
num_layers = 1
hidden_size = 16
num_attention_heads = 2
vocab_size = 257
seq_length = 16
[batch]
micro_batch_size = 1
global_batch_size = 4
[layout]
data_parallel_size = 2
[checkpoint]
save_interval = 5
"""


class Server:
    """An S3 server of its own process, which forgets everything when it is killed."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self, corpus: Path) -> None:
        """Start it, with the corpus in ``s3://data/corpus``."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        self.files = s3fs.S3FileSystem(
            key="test", secret="test", endpoint_url=self.env["AWS_ENDPOINT_URL"], use_listings_cache=False,
            skip_instance_cache=True,
        )
        until = time.monotonic() + 60
        while True:
            try:
                self.files.mkdir("data")
                break
            except Exception:  # not yet there
                assert time.monotonic() < until and self.process.poll() is None
                time.sleep(0.1)
        for path in corpus.parent.glob(f"{corpus.name}.*"):
            self.files.put_file(str(path), f"data/{path.name}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Random bytes in short documents, in as many blocks as a run of ``STEPS`` steps does not touch soon."""
    tokens = np.random.default_rng(0).integers(0, 256, MEGABYTES << 19)
    with IndexedWriter(tmp_path / "in" / "corpus", vocab_size=257) as writer:
        for part in np.split(tokens, 64):
            writer.add_document(part)
        writer.describe(CorpusMeta(tokenizer="byte", vocab_size=257, eod_id=256))
    return tmp_path / "in" / "corpus"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.kill()


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_a_run_from_a_bucket_is_the_local_run_though_the_server_dies(commands: Commands, corpus, server, tmp_path):
    (tmp_path / "run.toml").write_text(f'output_dir = "{tmp_path}"\n{RUN}')

    def train(name: str, *sets: str, data: str, ranks: int = 2) -> list[str]:
        options = (f"name={name}", f"layout.data_parallel_size={ranks}", f'data.train=["{data}"]', *sets)
        return ["train", str(tmp_path / "run.toml"), "--nproc", str(ranks), *(p for s in options for p in ("--set", s))]

    steps = f"training.steps={STEPS}"
    local = commands.start(*train("local", steps, data=str(corpus)))
    server.start(corpus)
    assert local.wait(120) == 0, local.output()
    remote = train("remote", steps, "checkpoint.mirror=s3://data/runs", data="s3://data/corpus")
    run = commands.start(*remote, env=server.env)
    while "step 7/" not in run.output() and run.poll() is None:
        time.sleep(0.01)
    server.kill()
    assert run.wait(120) == 4, run.output()
    output = run.output()
    assert "s3://data/corpus.bin: could not read it in 4 attempts" in output and "Traceback" not in output
    server.start(corpus)
    again = commands.start(*remote, env=server.env)
    assert again.wait(120) == 0, again.output()
    assert "resuming" in again.output() or "resumed" in again.output(), again.output()
    assert losses(tmp_path / "remote") == losses(tmp_path / "local")
    there = server.files.ls("data/runs/remote")
    for step in (5, STEPS):  # of step 5 the server that died had the copy; no save makes it again
        assert any(name.startswith(f"data/runs/remote/step-{step:08d}") for name in there), there

    resumed = commands.start(
        *train("elsewhere", f"training.steps={STEPS + 2}", "checkpoint.resume=s3://data/runs/remote",
               data="s3://data/corpus", ranks=1), env=server.env)
    assert resumed.wait(120) == 0, resumed.output()
    assert sorted(losses(tmp_path / "elsewhere")) == [STEPS + 1, STEPS + 2]
