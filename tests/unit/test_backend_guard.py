"""The JIT guard, in processes of its own because it patches modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
import torch
from megatron_port.backend.jit_guard import install_guard, prepare_deepspeed, prebuilt_deepspeed_ops
from megatron_port.errors import EnvironmentFault

def refused(function, *words):
    try:
        function()
    except EnvironmentFault as error:
        assert all(w in str(error) for w in words), str(error)
    else:
        raise AssertionError("it was not refused")
"""


def run(code: str, path: Path = ROOT) -> str:
    """Run a script in a fresh interpreter; its output, or fail with its error."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", HEAD + code], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_extensions_and_compile_are_refused_and_the_guard_comes_off() -> None:
    run("""
import torch.utils.cpp_extension as cpp
before = (cpp.load, cpp.load_inline, cpp._jit_compile, torch.compile)
undo = install_guard(False)
refused(lambda: cpp.load("my_op", ["x.cpp"]), "my_op", "--no-build-isolation")
refused(lambda: cpp.load_inline(name="my_other", cpp_sources=[""]), "my_other")
def double(x): return 2 * x
compiled = torch.compile(double)          # decorating alone is harmless
refused(lambda: compiled(torch.ones(1)), "double", "allow_compile")
refused(lambda: torch.compile(dynamic=True)(double)(torch.ones(1)), "double")
refused(lambda: torch.compile(torch.nn.Linear(1, 1)), "Linear")
undo()
assert before == (cpp.load, cpp.load_inline, cpp._jit_compile, torch.compile)
undo = install_guard(True)
assert torch.compile is before[3]
refused(lambda: cpp.load("my_op", ["x.cpp"]), "my_op")
""")


def test_triton_is_refused(tmp_path: Path) -> None:
    for name in ("triton", "triton/compiler"):
        (tmp_path / name).mkdir()
    (tmp_path / "triton/__init__.py").write_text("from .compiler import compile\n")
    (tmp_path / "triton/compiler/__init__.py").write_text("from .compiler import compile\n")
    (tmp_path / "triton/compiler/compiler.py").write_text("def compile(src, **options):\n    return 'built'\n")
    run("""
import triton, triton.compiler, types
source = types.SimpleNamespace(fn=lambda: 0)
source.fn.__name__ = "softmax_kernel"
undo = install_guard(False)
refused(lambda: triton.compile(source), "softmax_kernel", "allow_compile")
refused(lambda: triton.compiler.compile(source), "softmax_kernel")
undo()
assert triton.compile(source) == "built"
install_guard(True)
assert triton.compile(source) == "built"
""", tmp_path)


def test_deepspeed_ops_load_if_prebuilt_and_are_refused_if_not() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    out = run("""
prepare_deepspeed()
import deepspeed
assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False
install_guard(False)
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder, CPULionBuilder
built = prebuilt_deepspeed_ops()
assert "deepspeed_not_implemented" not in built
for builder in (CPUAdamBuilder, CPULionBuilder, ShareMemCommBuilder):
    if built[builder.NAME]:
        assert builder().load() is not None
        print("loaded", builder.NAME)
    else:
        refused(lambda: builder().load(), builder.NAME, builder.BUILD_VAR + "=1", "DS_ACCELERATOR=cpu")
        print("refused", builder.NAME)
""")
    assert len(out.split()) >= 6


def test_a_guard_before_the_import_still_stops_a_build() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    run("""
install_guard(False)
import deepspeed
from deepspeed.ops.op_builder.cpu import CPULionBuilder
if not prebuilt_deepspeed_ops()["cpu_lion"]:
    refused(lambda: CPULionBuilder().load(), "cpu_lion")
""")


def test_the_optimizer_follows_what_is_prebuilt() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    run("""
from megatron_port.backend.device import choose_device
from megatron_port.backend.providers import choose_providers
from megatron_port.config.schema import BackendConfig
cpu = choose_device("cpu")
def provider(optimizer, dtype=torch.float32):
    return choose_providers(BackendConfig(optimizer=optimizer), cpu, dtype, engine="deepspeed").table[2]
if prebuilt_deepspeed_ops()["cpu_adam"]:
    assert provider("auto").provider == provider("deepspeed").provider == "deepspeed"
    assert provider("auto", torch.float64).provider == "torch"
import deepspeed.git_version_info as built
built.installed_ops["cpu_adam"] = False
row = provider("auto")
assert row.provider == "torch" and "DS_BUILD_CPU_ADAM=1" in row.why
refused(lambda: provider("deepspeed"), "DS_BUILD_CPU_ADAM=1")
""")


def test_deepspeed_that_cannot_be_imported_is_explained(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise OSError('undefined symbol')\n")
    run('refused(prepare_deepspeed, "OSError: undefined symbol", "native")', tmp_path)
