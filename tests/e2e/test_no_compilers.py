"""A training run on a node that has no compiler: nothing asks for one, and an op that is missing stops it by name.

Where the compilers would be on PATH stand traps, which leave a mark and fail. The runs are whole commands in processes
of their own, engine DeepSpeed, on two tensor-parallel ranks where it matters.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_port.core.errors import EXIT_ENVIRONMENT, EXIT_OK

pytest.importorskip("deepspeed", reason="deepspeed is not installed")

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "SLURM_", "TORCHELASTIC_", "PMI_", "OMPI_")
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "c89", "c99", "x86_64-linux-gnu-gcc",
             "x86_64-linux-gnu-g++", "ld", "as", "ninja", "make", "cmake", "nvcc", "ptxas", "hipcc", "amdclang++")
# What torch, DeepSpeed and Python themselves start: harmless questions about the machine, and the loader's.
HARMLESS = ("sh", "bash", "uname", "lscpu", "cat", "ldconfig", "file", "env", "git", "which")
RUN_FILE = """
name = "run"
engine = "deepspeed"
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 4
vocab_size = 300
seq_length = 32
[layout]
tensor_parallel_size = 2
vocab_padding_multiple = 8
[batch]
micro_batch_size = 2
global_batch_size = 4
[precision]
dtype = "bf16"
[data]
synthetic = true
tokenizer = "byte"
[training]
steps = 3
[backend]
device = "cpu"
"""
# Loaded by Python before anything else: what `installed_ops` says is all that DeepSpeed knows of its own wheel.
MISSING_OP = """
import importlib.abc, sys

class AfterDeepSpeedsList(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "deepspeed.git_version_info" and self in sys.meta_path:
            sys.meta_path.remove(self)
            import deepspeed.git_version_info as built
            built.installed_ops["cpu_adam"] = False
        return None

sys.meta_path.insert(0, AfterDeepSpeedsList())
"""
# A first use, in the middle of a run, of an op that no start-up check knows of.
USED_LATER = """
import importlib.abc, sys

class AfterTheLoop(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "megatron_port.run.trainer" and self in sys.meta_path:
            sys.meta_path.remove(self)
            import megatron_port.ext.deepspeed.deepspeed_engine as engine
            real = engine.DeepSpeedEngine.train_step
            def train_step(self, *args, **kwargs):
                WAY
                return real(self, *args, **kwargs)
            engine.DeepSpeedEngine.train_step = train_step
        return None

sys.meta_path.insert(0, AfterTheLoop())
"""
WAYS = {
    "DeepSpeed": ("from deepspeed.ops.op_builder.cpu import CPULionBuilder; CPULionBuilder().load()",
                  ("the DeepSpeed op 'cpu_lion'", "DS_BUILD_CPU_LION=1")),
    "cpp_extension": ("import torch.utils.cpp_extension as c; c.load('my_scan', ['scan.cpp'])",
                      ("the extension 'my_scan'", "--no-build-isolation")),
    "inductor": ("import torch; torch.compile(lambda x: 2 * x)(torch.ones(1))", ("torch.compile", "make kernels")),
}


class Node:
    """A folder with a PATH of traps, a run file, and a ``sitecustomize`` for the ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path, self.marks = folder, folder / "bin", folder / "marks"
        self.path.mkdir()
        self.marks.mkdir()
        (folder / "site").mkdir()
        for name in COMPILERS:
            trap = self.path / name
            trap.write_text(f'#!{shutil.which("sh")}\necho "$0 $*" >> "{self.marks}/{name}"\nexit 1\n')
            trap.chmod(0o755)
        for name in HARMLESS:
            found = shutil.which(name)
            if found:
                (self.path / name).symlink_to(found)
        (folder / "run.toml").write_text(f'output_dir = "{folder / "runs"}"\n{RUN_FILE}')

    def train(self, *sets: str, startup: str = "", nproc: int = 2) -> tuple[int, str]:
        """``megatron-port train``; (exit code, all that it printed)."""
        (self.folder / "site" / "sitecustomize.py").write_text(startup)
        kept = {k: v for k, v in os.environ.items() if not k.startswith((*LAUNCHERS, "DS_", "TORCH", "CC", "CXX"))}
        env = {**kept, "PATH": str(self.path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HOME":
               str(self.folder), "TORCH_EXTENSIONS_DIR": str(self.folder / "extensions"),
               "PYTHONPATH": f"{self.folder / 'site'}{os.pathsep}{ROOT}"}
        options = [part for value in sets for part in ("--set", value)]
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_port", "train", str(self.folder / "run.toml"), "--nproc", str(nproc),
             *options], env=env, cwd=self.folder, text=True, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return process.returncode, output

    def asked_for(self) -> dict[str, str]:
        """Compilers that were started, and how."""
        return {mark.name: mark.read_text() for mark in self.marks.iterdir()}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


ALONE = "layout.tensor_parallel_size=1"


def test_the_traps_work(node: Node) -> None:
    """The same node, the guard off, an op that is not built: a compiler is asked for and the mark is there."""
    startup = USED_LATER.replace("WAY", WAYS["cpp_extension"][0])
    (node.folder / "scan.cpp").write_text("int scan() { return 1; }\n")
    code, output = node.train("backend.allow_jit=true", ALONE, startup=startup, nproc=1)
    assert code != EXIT_OK and node.asked_for(), output
    assert "backend.allow_jit = true: ops may be compiled" in output


def test_a_run_needs_no_compiler(node: Node) -> None:
    code, output = node.train()
    assert code == EXIT_OK, output
    assert "step 3/3" in output and "Traceback" not in output
    assert node.asked_for() == {}
    assert not (node.folder / "extensions").exists(), "where torch would have built"
    assert not (node.folder / ".cache" / "torch_extensions").exists()


def test_an_op_that_the_run_asks_for_and_is_not_built_stops_it_at_the_start(node: Node) -> None:
    code, output = node.train('backend.optimizer="deepspeed"', startup=MISSING_OP)  # two ranks, one message
    assert code == EXIT_ENVIRONMENT, output
    assert "cpu_adam was not built ahead of time" in output and "DS_BUILD_CPU_ADAM=1" in output
    assert "Traceback" not in output and "step 1/" not in output
    assert output.count("error: ") == 1 and node.asked_for() == {}


@pytest.mark.parametrize("way", WAYS)
def test_a_build_in_the_middle_of_a_run_stops_it_by_name(node: Node, way: str) -> None:
    statement, words = WAYS[way]
    code, output = node.train(ALONE, startup=USED_LATER.replace("WAY", statement), nproc=1)
    assert code == EXIT_ENVIRONMENT, output
    for word in (*words, "would be compiled at run time", "backend.allow_jit = true"):
        assert word in output, output
    assert "Traceback" not in output and output.count("error: ") == 1 and node.asked_for() == {}
