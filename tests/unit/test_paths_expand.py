"""One rule for every path setting and path argument: ``~`` and variables are replaced, and unknown ones refused."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

import pytest

from megatron_port.cli.main import COMMANDS, main
from megatron_port.core.config.choices import leaf_types
from megatron_port.core.config.loader import load
from megatron_port.core.config.ranges import expanded, expanded_tokenizer, local_path, path_mark
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("NOWHERE", raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", ["~", "~/a b", "~root/x", "$SCRATCH/a", "${SCRATCH}", "x/$SCRATCH/${HOME}.y", "a/~/b",
                                  "cost$5", "a$", "~a.b~", "", "./~x"])
def test_as_the_library_does(text):
    assert expanded(text) == os.path.expandvars(os.path.expanduser(text)) and local_path(text) == Path(expanded(text))


@pytest.mark.parametrize("text, message", [
    ("$NOWHERE/x", "variable 'NOWHERE' is not set"), ("a/${NOWHERE}", "variable 'NOWHERE' is not set"),
    ("$EMPTY/x", "variable 'EMPTY' is empty"), ("~nobody.of.this.name/x", "home of 'nobody.of.this.name' is not known"),
])
def test_what_is_not_known_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        expanded(text)


def test_urls_and_tokenizers():
    assert expanded("s3://$SCRATCH/~") == f"s3://{os.environ['SCRATCH']}/~"
    assert expanded_tokenizer("hf:~/t") == f"hf:{os.environ['HOME']}/t"
    assert expanded_tokenizer("sentencepiece:$SCRATCH/m") == f"sentencepiece:{os.environ['SCRATCH']}/m"
    assert expanded_tokenizer("tiktoken:$x") == "tiktoken:$x" and expanded_tokenizer("gpt2") == "gpt2"


NOT_PATHS = {  # settings of text that are none; a new one must be put here, or be a PathSetting
    "name", "model.name", "model.family", "model.mixer", "optimizer.name", "data.source", "layout.pipeline_schedule",
    "training.loss",
    "cluster.name", "cluster.device_label", "cluster.interface", "cluster.partition", "cluster.qos",
    "cluster.charge_unit", "hardware.device", "cluster.container_python", "calibration.source", "launch.account",
    "launch.time", "launch.mail", "preflight.network_plugin", "telemetry.project", "telemetry.published_source",
    "telemetry.profile", "telemetry.profile_ranks", "optimizer.decay",
}


def test_every_setting_that_is_a_path(home):
    kinds = {name: kind for name, kind in leaf_types(RunConfig) if str in (kind, getattr(kind, "__origin__", None))}
    paths = [name for name, kind in leaf_types(RunConfig) if path_mark(kind)]
    rest = {name for name in kinds if name not in paths and not name.startswith("backend.")}
    assert {"output_dir", "data.train", "checkpoint.resume", "offload.nvme_path", "launch.stage"} <= set(paths)
    assert rest <= NOT_PATHS, f"a path, or none? {rest - NOT_PATHS}"
    for name in paths:
        array = name in ("data.train", "cluster.container_mounts")
        for before, after in (("~/x", f"{home}/home/x"), ("$SCRATCH/x", f"{home}/scratch/x")):
            text = f"hf:{before}" if name == "data.tokenizer" else before
            value = load(None, [f'{name}={[text] if array else chr(34) + text + chr(34)}'])
            found: object = value.config
            for part in name.split("."):
                found = getattr(found, part)
            assert after in str(found)
        with pytest.raises(ConfigError, match="NOWHERE"):
            load(None, [f"{name}={['hf:$NOWHERE/x'] if array else 'hf:$NOWHERE/x'}"])


def test_run_files(home):
    (home / "home" / "base.toml").write_text('seed = 7\noutput_dir = "$SCRATCH/runs"\n')
    (home / "run.toml").write_text('extends = "~/base.toml"\n')
    assert load("run.toml").config.seed == 7 == load("$HOME/base").config.seed
    assert load("run.toml").config.output_dir == f"{home}/scratch/runs"
    (home / "run.toml").write_text('extends = "$NOWHERE/base.toml"\n[checkpoint]\nresume = "~nobody.x/a"\n')
    with pytest.raises(ConfigError, match=r"(?s)run.toml:1: .*'NOWHERE' is not set.*run.toml:3: .*'nobody.x'"):
        load("run.toml")


NO_PATHS = {"profile", "profile_ranks", "kind", "skip", "json_key", "split", "suffix", "eod", "chat_fields",
            "chat_ignore", "prompt", "stop", "tasks", "layouts", "plugin", "drop_layers", "factor", "after", "gpu",
            "vary", "asked", "price", "study", "nodes", "overrides", "master_addr", "shell",
            "schedule", "faults", "chosen"}
"""Arguments of text that are no paths; ``resume`` and ``data`` of a run become ``--set``, which expands them."""


def arguments(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in {id(p): p for p in action.choices.values()}.values():
                yield from arguments(inner)
        elif action.nargs != 0:
            yield action


def test_every_argument_that_is_a_path():
    for name in COMMANDS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"megatron_port.cli.{name}").add_parser(parser.add_subparsers())
        for action in arguments(parser):
            by_set = action.dest == "resume" or type(action).__name__ == "_Corpus"
            plain = action.type in (None, Path) and not action.choices and not by_set
            assert not plain or action.dest in NO_PATHS, f"{name}: {action.dest}; give it type=expanded or local_path"


def test_commands(home, capsys):
    (home / "home" / "a.txt").write_text("plain words\n" * 40)
    assert main(["data", "prepare", "~/c", "--input", "$HOME/a.txt"]) == 0
    assert main(["data", "show", "~/c"]) == 0 and main(["data", "blend", "$HOME/c=1"]) == 0
    assert not [p for p in home.iterdir() if p.name.startswith(("~", "$"))]
    assert (home / "home" / "c.bin").is_file()
    capsys.readouterr()
    assert main(["data", "prepare", "$NOWHERE/c", "--input", "~/a.txt"]) == 2
    assert "'NOWHERE' is not set" in capsys.readouterr().err
