"""``from megatron_port import …``: light until it is used, typed, and the lines of the docs run."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_port

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, timeout: int = 120) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_is_light():
    code = ("import sys, json; before = set(sys.modules); import megatron_port as m; "
            "light = set(sys.modules) - before; c = m.load_config('models/gpt-tiny').model; "
            "print(json.dumps([sorted(light), 'torch' in sys.modules, 'numpy' in sys.modules, c.num_layers > 0]))")
    light, torch, numpy, right = json.loads(python(code))
    assert [m for m in light if m.startswith("megatron_port")] == ["megatron_port", "megatron_port.former_names"]
    assert (torch, numpy, right) == (False, False, True)


def test_every_name_is_there_and_typed():
    tree = ast.parse((ROOT / "megatron_port" / "__init__.py").read_text())
    typed = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
             and node.module.startswith("megatron_port") for alias in node.names if alias.asname}
    names = set(megatron_port.__all__) - {"__version__"}
    assert typed == names == set(megatron_port._WHERE)
    for name in names:
        assert getattr(megatron_port, name).__doc__, name
    assert names <= set(dir(megatron_port)) and (ROOT / "megatron_port" / "py.typed").is_file()
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = megatron_port.tarin


def example(text: str, language: str) -> str:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)[0]


def test_the_ten_lines_of_the_docs():
    code = example((ROOT / "docs" / "api.md").read_text(), "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    quick = code.replace('"data.synthetic=true"', '"data.synthetic=true", "model.seq_length=32"')
    losses = [float(line.split()[1]) for line in python(quick, 280).splitlines() if re.match(r"\d+ \d", line)]
    assert len(losses) == 10 and losses[-1] < losses[0]
