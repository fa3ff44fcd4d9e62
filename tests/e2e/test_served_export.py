"""An exported folder behind transformers' server: text for a prompt, by its OpenAI-like interface."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from commands import Commands

LIMIT_S = 300
RUN_FILE = """
name = "run"
[model]
num_layers = 2
hidden_size = 64
num_attention_heads = 4
seq_length = 64
position_embedding = "rope"
normalization = "rmsnorm"
activation = "swiglu"
family = "llama"
[batch]
global_batch_size = 4
[precision]
dtype = "fp32"
[optimizer]
lr = 3e-3
[training]
steps = 40
[data]
train = ["corpus"]
"""
PROMPT, TOKENS = "The quick", 24


def _answer(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


@pytest.mark.slow
def test_transformers_serves_it(tmp_path: Path, commands: Commands) -> None:
    """The server's greedy text is that of ``generate`` on the checkpoint."""
    for package in ("fastapi", "uvicorn", "openai"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'transformers[serving]'")
    lines = [f"The quick brown fox number {i} jumps over the lazy dog, said the king to his lady." for i in range(300)]
    (tmp_path / "in.txt").write_text("\n".join(lines))
    (tmp_path / "run.toml").write_text(RUN_FILE)
    for arguments in (
        ("data", "tokenizer", "tokenizer.json", "--input", "in.txt", "--vocab-size", "280"),
        ("data", "prepare", "corpus", "--input", "in.txt", "--tokenizer", "hf:tokenizer.json"),
        ("train", "run.toml"), ("checkpoint", "export", "runs/run", "out", "--to", "hf"),
        ("generate", "runs/run", "--prompt", PROMPT, "--temperature", "0", "--tokens", str(TOKENS), "--json"),
    ):
        command = commands.start(*arguments, cwd=tmp_path)
        assert command.wait(LIMIT_S) == 0, command.output()
    wanted = json.loads(next(line for line in command.output().splitlines() if line.startswith("{")))["text"]
    folder = str(tmp_path / "out")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "transformers.cli.transformers", "serve", "--device", "cpu", "--host", "127.0.0.1",
         "--port", str(port), folder],
        env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                assert _answer(port, "/health")["status"] == "ok"
                break
            except (urllib.error.URLError, ConnectionError):
                assert server.poll() is None and time.monotonic() < until
                time.sleep(0.5)
        body = {"model": folder, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        assert _answer(port, "/v1/completions", body)["choices"][0]["text"] == wanted
    finally:
        server.kill()
        server.wait()
