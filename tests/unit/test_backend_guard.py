"""The JIT guard, in processes of its own because it patches modules."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from forked import ForkServer

HEAD = """
import torch
from megatron_port.ext.deepspeed.prepare import prepare_deepspeed
from megatron_port.ext.kernels.jit_guard import install_guard, prebuilt_deepspeed_ops
from megatron_port.core.errors import EnvironmentFault

def refused(function, *words):
    try:
        function()
    except EnvironmentFault as error:
        assert all(w in str(error) for w in words), str(error)
    else:
        raise AssertionError("it was not refused")
"""


@pytest.fixture(scope="module")
def fresh() -> Iterator[ForkServer]:
    """Interpreters that have imported torch and the guard, and no compiler."""
    server = ForkServer(HEAD, DS_ACCELERATOR="cpu")
    yield server
    server.close()


@pytest.fixture(scope="module")
def prepared() -> Iterator[ForkServer]:
    """Interpreters that have prepared DeepSpeed."""
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    server = ForkServer(HEAD + "prepare_deepspeed()", DS_ACCELERATOR="cpu")
    yield server
    server.close()


def test_extensions_and_compile_are_refused_and_the_guard_comes_off(fresh: ForkServer) -> None:
    fresh.run("""
import torch.utils.cpp_extension as cpp
before = (cpp.load, cpp.load_inline, cpp._jit_compile, cpp._run_ninja_build, torch.compile)
early = cpp._jit_compile
undo = install_guard(False)
refused(lambda: cpp.load("my_op", ["x.cpp"]), "my_op", "--no-build-isolation", "backend.allow_jit = true")
refused(lambda: cpp.load_inline(name="my_other", cpp_sources=[""]), "my_other")
refused(lambda: cpp._run_ninja_build("/build/x", False, ""), "/build/x")
def double(x): return 2 * x
compiled = torch.compile(double)          # decorating alone is harmless
refused(lambda: compiled(torch.ones(1)), "double", "make kernels", "backend.allow_jit = true")
refused(lambda: torch.compile(dynamic=True)(double)(torch.ones(1)), "double")
refused(lambda: torch.compile(torch.nn.Linear(1, 1)), "Linear")
assert torch.compile(double, backend="eager")(torch.ones(1)) == 2
undo()
undo()
assert before == (cpp.load, cpp.load_inline, cpp._jit_compile, cpp._run_ninja_build, torch.compile)
""")


def test_names_taken_before_the_guard_end_in_it(fresh: ForkServer) -> None:
    """``from torch.utils.cpp_extension import load`` and dynamo's lookup of inductor by name."""
    fresh.run("""
from torch.utils.cpp_extension import load
from torch._dynamo.backends.registry import lookup_backend
import torch._inductor.cpp_builder as builder
install_guard(False)
refused(lambda: load("early", ["x.cpp"]), "early")
refused(lambda: lookup_backend("inductor")(None, []), "inductor", "make kernels")
refused(lambda: builder.CppBuilder.build(object()), "C++ kernel")
""")


def test_modules_that_come_later_are_closed_too_and_opened_again(fresh: ForkServer) -> None:
    fresh.run("""
import sys
late = ("torch.utils.cpp_extension", "torch._inductor.cpp_builder", "torch._inductor.codecache")
assert not [name for name in late if name in sys.modules], "nothing of it is imported by torch or by us"
finders = list(sys.meta_path)
undo = install_guard(False)
assert len(sys.meta_path) == len(finders) + 1
import torch.utils.cpp_extension as cpp
import torch._inductor.codecache as codecache
import inspect, pkgutil
assert "def load(" in inspect.getsource(cpp)
assert type(cpp.__loader__).__name__ == type(cpp.__spec__.loader).__name__ == "SourceFileLoader"
refused(lambda: cpp.load("late", ["x.cpp"]), "late")
refused(lambda: codecache.CUTLASSCodeCache.compile("", "so"), "CUTLASS")
from torch.utils.cpp_extension import load
undo()
assert sys.meta_path == finders
try:
    load("late", ["/nowhere/x.cpp"])
except EnvironmentFault as error:
    raise AssertionError("what was copied from a closed module must work again") from error
except Exception:
    pass
""")


def test_the_switch_takes_all_of_it_off_and_guards_are_counted(fresh: ForkServer) -> None:
    fresh.run("""
import sys
import torch.utils.cpp_extension as cpp
import torch._native.registry as native
before = (cpp.load, torch.compile, list(sys.meta_path))
undo = install_guard(True)
assert before == (cpp.load, torch.compile, list(sys.meta_path))
first, second = install_guard(False), install_guard(False)
assert len(sys.meta_path) == len(before[2]) + 1
undo()
first()
first()
refused(lambda: cpp.load("x", ["x.cpp"]), "x")
second()
assert before == (cpp.load, torch.compile, list(sys.meta_path))
""")


def test_what_torch_compiles_by_itself_is_taken_out_and_put_back(fresh: ForkServer) -> None:
    """TorchScript's fuser, the Triton and CuTe overrides of torch 2.13, the jiterator, NVRTC."""
    fresh.run("""
import sys, types
import torch.cuda.jiterator as jiterator
import torch.cuda._utils as cuda_utils
calls = []
registry = types.ModuleType("torch._native.registry")
registry.deregister_op_overrides = lambda **kw: calls.append(("out", kw))
registry.reenable_op_overrides = lambda **kw: calls.append(("back", kw))
sys.modules["torch._native.registry"] = registry
fuser = torch._C._jit_texpr_fuser_enabled()
undo = install_guard(False)
assert not torch._C._jit_texpr_fuser_enabled()
assert calls == [("out", {"disable_dsl_names": ["cutedsl", "triton"]})]
kernel = jiterator._create_jit_fn("template <typename T> T twice(T x) { return x + x; }")
refused(lambda: kernel(torch.ones(1)), "twice")
if hasattr(cuda_utils, "_nvrtc_compile"):
    refused(lambda: cuda_utils._nvrtc_compile("text", "my_kernel"), "my_kernel", "NVRTC")
undo()
assert torch._C._jit_texpr_fuser_enabled() == fuser
assert calls[1:] == [("back", {"enable_dsl_names": ["cutedsl", "triton"]})]
""")


def test_the_guard_is_in_a_forked_child(fresh: ForkServer) -> None:
    fresh.run("""
import os
import torch.utils.cpp_extension as cpp
install_guard(False)
child = os.fork()
if child == 0:
    try:
        cpp.load("in_the_child", ["x.cpp"])
    except EnvironmentFault as error:
        os._exit(11 if "in_the_child" in str(error) else 12)
    os._exit(13)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
""")


def test_an_extension_names_the_package_that_wants_it(fresh: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "fastops").mkdir()
    (tmp_path / "fastops/__init__.py").write_text(
        "from torch.utils.cpp_extension import load\ndef scan(): return load('scan_op', ['scan.cpp'])\n"
    )
    meta = tmp_path / "fast_ops_dist-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: fast-ops-dist\nVersion: 1.0\n")
    (meta / "RECORD").write_text("fastops/__init__.py,,\n")
    (meta / "top_level.txt").write_text("fastops\n")
    fresh.run("""
import fastops
install_guard(False)
refused(fastops.scan, "scan_op", "of fastops", "fast-ops-dist")
""", tmp_path)


def test_triton_is_refused(fresh: ForkServer, tmp_path: Path) -> None:
    """A stand-in with Triton's layout: its compiler, the launch of a kernel, the C compiler behind its driver."""
    for name in ("triton", "triton/compiler", "triton/runtime"):
        (tmp_path / name).mkdir()
    (tmp_path / "triton/__init__.py").write_text("from .compiler import compile\n")
    (tmp_path / "triton/compiler/__init__.py").write_text("from .compiler import compile\n")
    (tmp_path / "triton/compiler/compiler.py").write_text("def compile(src, **options):\n    return 'built'\n")
    (tmp_path / "triton/runtime/__init__.py").write_text("")
    (tmp_path / "triton/runtime/jit.py").write_text(
        "class JITFunction:\n    __name__ = 'scan_kernel'\n    def _do_compile(self, *args): return 'built'\n"
    )
    (tmp_path / "triton/runtime/build.py").write_text(
        "def _build(name, *args): return 'built'\ndef compile_module_from_src(src, name): return _build(name)\n"
    )
    fresh.run("""
import types
source = types.SimpleNamespace(fn=lambda: 0)
source.fn.__name__ = "softmax_kernel"
undo = install_guard(False)
import triton, triton.compiler                       # only now: it is closed as it is imported
from triton.runtime.build import compile_module_from_src
from triton.runtime.jit import JITFunction
refused(lambda: triton.compile(source), "softmax_kernel", "make kernels", "backend.allow_jit = true")
refused(lambda: triton.compiler.compile(source), "softmax_kernel")
refused(lambda: JITFunction()._do_compile("key"), "scan_kernel")
refused(lambda: compile_module_from_src("int main;", "cuda_utils"), "cuda_utils")
undo()
assert triton.compile(source) == JITFunction()._do_compile() == compile_module_from_src("", "x") == "built"
undo = install_guard(False)                          # and now that it is there already
refused(lambda: triton.compile(source), "softmax_kernel")
undo()
install_guard(True)
assert triton.compile(source) == "built"
""", tmp_path)


def test_deepspeed_ops_load_if_prebuilt_and_are_refused_if_not(prepared: ForkServer) -> None:
    out = prepared.run("""
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
        refused(lambda: builder().load(), builder.NAME, builder.BUILD_VAR + "=1", "DS_ACCELERATOR=cpu", "allow_jit")
        print("refused", builder.NAME)
""")
    assert len(out.split()) >= 6


def test_the_cute_dsl_is_closed(fresh: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "cutlass/base_dsl").mkdir(parents=True)
    (tmp_path / "cutlass/__init__.py").write_text(
        "def kernel():\n    from cutlass.base_dsl.compiler import Compiler\n    return Compiler().compile('module')\n"
    )
    (tmp_path / "cutlass/base_dsl/__init__.py").touch()
    (tmp_path / "cutlass/base_dsl/compiler.py").write_text("class Compiler:\n    def compile(self, module): return 1\n")
    (tmp_path / "newflash.py").write_text("import cutlass\ndef forward(): return cutlass.kernel()\n")
    fresh.run("""
import newflash
undo = install_guard(False)
refused(newflash.forward, "CuTe kernel of newflash", "nvidia-cutlass-dsl", "allow_jit")
undo()
assert newflash.forward() == 1
""", tmp_path)


def test_the_builder_in_rocm_apex_is_closed(fresh: ForkServer, tmp_path: Path) -> None:
    """A stand-in with its layout: the module is there whether built or not, and its first use may compile."""
    (tmp_path / "apex/op_builder").mkdir(parents=True)
    (tmp_path / "apex/__init__.py").touch()
    (tmp_path / "apex/op_builder/__init__.py").touch()
    (tmp_path / "apex/op_builder/builder.py").write_text("class OpBuilder:\n    def jit_load(self): return 'built'\n")
    fresh.run("""
install_guard(False)
from apex.op_builder.builder import OpBuilder
class AmpC(OpBuilder):
    name, BUILD_VAR = "amp_C", "APEX_BUILD_AMP_C"
refused(AmpC().jit_load, "apex op 'amp_C'", "APEX_BUILD_AMP_C=1", "--no-build-isolation", "allow_jit")
""", tmp_path)


def test_a_prebuild_command_keeps_the_ops_that_are_there(prepared: ForkServer) -> None:
    prepared.run("""
from megatron_port.ext.kernels import jit_guard
import deepspeed.git_version_info as built
for op in built.installed_ops:
    built.installed_ops[op] = op in ("cpu_adam", "cpu_lion")
command = jit_guard.prebuild_command("deepspeed_shm_comm", switch="DS_BUILD_SHM_COMM")
words = command.split()
assert [w for w in words if w.startswith("DS_BUILD_")] == [
    "DS_BUILD_OPS=0", "DS_BUILD_SHM_COMM=1", "DS_BUILD_CPU_ADAM=1", "DS_BUILD_CPU_LION=1"], words
assert words[-1] == "deepspeed==0.19.8" and "TORCH_CUDA_ARCH_LIST" not in command
assert 'TORCH_CUDA_ARCH_LIST="8.0;9.0"' in jit_guard.prebuild_command("fused_adam", "cuda")
torch.version.hip = "7.1"
assert 'PYTORCH_ROCM_ARCH="gfx90a"' in jit_guard.prebuild_command("fused_adam", "cuda")
""")


def test_preparing_deepspeed_starts_no_compiler(prepared: ForkServer, tmp_path: Path) -> None:
    """Asked which ops are compatible, DeepSpeed compiles test programs; we answer before it looks."""
    prepared.run("""
import deepspeed.ops, deepspeed.ops.op_builder.builder as builder
def probe(*args, **kwargs): raise AssertionError("DeepSpeed probes the machine")
builder.probe_is_compatible = probe
assert deepspeed.ops.__compatible_ops__["cpu_adam"] == prebuilt_deepspeed_ops()["cpu_adam"]
""")


def test_starting_deepspeed_imports_no_compiler(prepared: ForkServer) -> None:
    """Muon's decorators import inductor, torch's optimizers dynamo: 3 and 1.5 s of processor time a rank."""
    prepared.run("""
import sys
from deepspeed.runtime import compiler
from deepspeed.runtime.zero import utils
utils.dist.get_rank = lambda: 1
assert utils.is_zero_supported_optimizer(torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]))
assert "deepspeed.runtime.zero.muon.original_muon" in sys.modules
assert "torch._inductor.compile_fx" not in sys.modules
assert compiler.compile.__module__ == compiler.__name__  # put back
from deepspeed.ops.adam import DeepSpeedCPUAdam
adam = DeepSpeedCPUAdam if prebuilt_deepspeed_ops()["cpu_adam"] else torch.optim.SGD
optimizer = adam([torch.nn.Parameter(torch.ones(2))])
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
assert "torch._dynamo" not in sys.modules
assert torch.compile(lambda x: optimizer.zero_grad() or x + 1, backend="eager")(torch.zeros(1)) == 1
""")


def test_a_guard_before_the_import_still_stops_a_build(fresh: ForkServer) -> None:
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    fresh.run("""
install_guard(False)
import deepspeed
from deepspeed.ops.op_builder.cpu import CPULionBuilder
if not prebuilt_deepspeed_ops()["cpu_lion"]:
    refused(lambda: CPULionBuilder().load(), "cpu_lion", "DS_BUILD_CPU_LION=1")
""")


def test_the_optimizer_follows_what_is_prebuilt(prepared: ForkServer) -> None:
    prepared.run("""
from megatron_port.run.device import choose_device
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.core.config.schema import BackendConfig
cpu = choose_device("cpu")
def provider(optimizer, dtype=torch.float32):
    return choose_providers(BackendConfig(optimizer=optimizer), cpu, dtype, engine="deepspeed").table[-1]
if prebuilt_deepspeed_ops()["cpu_adam"]:
    assert provider("auto").provider == provider("deepspeed").provider == "deepspeed"
    assert provider("auto", torch.float64).provider == "torch"
import deepspeed.git_version_info as built
built.installed_ops["cpu_adam"] = False
row = provider("auto")
assert row.provider == "torch" and "DS_BUILD_CPU_ADAM=1" in row.why
refused(lambda: provider("deepspeed"), "DS_BUILD_CPU_ADAM=1")
""")


def test_deepspeed_that_cannot_be_imported_is_explained(fresh: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise OSError('undefined symbol')\n")
    fresh.run('refused(prepare_deepspeed, "OSError: undefined symbol", "native")', tmp_path)
