"""No password or key in a configuration, a diagnostic file or an error message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_port.core.config.checks import problems, secret_problems
from megatron_port.core.config.ranges import secret_name
from megatron_port.core.config.schema import DataConfig, RunConfig
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.io.logging import redact, redacted
from megatron_port.run.run_files import add_event, read_failure, record_failure
from megatron_port.tools.preflight.node_file import write_json

KEY = "d41d8cd98f00b204e9800998ecf8427e"
ENVIRON = {"WANDB_API_KEY": KEY, "MEGATRON_PORT_SECRET": "0123456789abcdef", "HOME": "/home/somebody", "TOKEN": "short"}

SECRETS = (
    "https://user:hunter22@mirror.example/simple", "postgres://a:b%40c@db/x", "https://abcdefghijklmnopqrst@host/x",
    f"wandb: login with {KEY} failed", "hf_" + "a1B2" * 8, "ghp_" + "x" * 36, "AKIA" + "ABCD" * 4, "sk-" + "q" * 40,
    "Authorization: Bearer abcdef.123456", "?x=1&api_key=zyxwv&y=2", "PASSWORD=swordfish",
    'x = {"auth-key": "swordfish"}',
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----", "--set trackers.access_token='swordfish'",
    "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJ",
)
LOST = ("hunter22", "b%40c", "abcdefghijklmnopqrst", KEY, "a1B2", "xxxxx", "AKIA", "qqqq", "abcdef.123456", "zyxwv",
        "swordfish", "MIIE", "eyJzdWIi")
HARMLESS = (
    "data.tokenizer=\"byte\"", "position 3: token id 65 is outside the vocabulary of 53", "eod_token=50256",
    "tokens=1024",
    "ssh://git@example.org/x", "file:///srv/a@b/c", "step 12: loss 3.25 nats per token", "--set training.steps=20",
    "master 10.0.0.1:29500", "rank 3 (tp 1, pp 0, dp 1) on node7", "signature of the kernel: (x, y)",
    "secret of the watch does not match", "https://docs.example/a?page=2",
)


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_hidden(text: str) -> None:
    said = redact(text, ENVIRON)
    assert "***" in said and not any(word in said for word in LOST), said


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_none_stays(text: str) -> None:
    assert redact(text, ENVIRON) == text


def test_values_that_become_json() -> None:
    """Texts at any depth, and what stands under a secret's name; numbers and keys stay."""
    value = {"a": [1, f"key {KEY}"], "api_key": "short", "tokens": 5, "n": None, "deep": {"url": "http://u:p@h/x"}}
    assert redacted(value, ENVIRON) == {
        "a": [1, "key ***"], "api_key": "***", "tokens": 5, "n": None, "deep": {"url": "http://***@h/x"}
    }


def test_the_files(tmp_path: Path, monkeypatch: Any) -> None:
    """Events, failures and preflight reports, with a secret of the environment and one in a URL."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    text = f"cannot reach https://me:hunter22@host/ with {KEY}"
    add_event(tmp_path, {"event": "failed", "message": text})
    record_failure(tmp_path, "7", 3, EnvironmentFault(text))
    write_json(tmp_path / "preflight.json", {"environment": {"different": {"NCCL_X": text}}})
    failure = read_failure(tmp_path, "7")
    assert failure is not None and failure.message == "cannot reach https://***@host/ with ***"
    assert json.loads((tmp_path / "events.jsonl").read_text())["message"] == failure.message
    written = "".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    assert KEY not in written and "hunter22" not in written


def test_a_configuration_with_a_secret_is_refused() -> None:
    """The field is named, the secret is not repeated."""
    run = RunConfig(data=DataConfig(train=("s3://user:hunter22@bucket/corpus",), synthetic=False))
    found = secret_problems(run)
    assert len(found) == 1 and found[0].startswith("data.train holds") and "hunter22" not in found[0]
    assert found[0] in problems(run)
    assert secret_problems(RunConfig()) == []


def test_names() -> None:
    assert all(map(secret_name, ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "secret")))
    assert not any(map(secret_name, ("TOKENIZERS_PARALLELISM", "SSH_AUTH_SOCK", "KEYBOARD", "MONKEY", "tokens")))
