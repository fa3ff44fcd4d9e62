"""Guard against compilation while training: building an op at run time fails with the command that prebuilds it.

Ops that were built ahead of time still load. The guard is installed once, before the engine is made;
:func:`install_guard` returns a function that takes it off again, and ``backend.allow_jit = true`` leaves it off.

Covered, in this process and in children that it forks (``train --nproc``, loader workers), whether the module is
loaded before or after the guard (``compile_entry_points`` has the list): DeepSpeed's ``OpBuilder.jit_load`` and the
same in ROCm's apex; ``torch.utils.cpp_extension``; ``torch.compile`` with inductor, and inductor's C++, CUTLASS and AOT
builders; Triton's compiler and the C stubs that it builds; CuTe's Python DSL; NVRTC through
``torch.cuda._compile_kernel`` and the jiterator. Taken out without an error, because torch has a compiled kernel for
the same: TorchScript's fuser, and the Triton and CuTe overrides of torch 2.13's own ops.

Not covered: a child that starts a new interpreter (it has no guard, and no part of this program starts one to
compute); other backends of ``torch.compile``, which someone chose by name; packages with a compiler of their own
(numba, cupy); compilers inside vendor libraries, which need no toolchain on the node: cuDNN's and MIOpen's run-time
kernels, and the few ATen functions that are kept as text (complex and special functions, none of them in a GPT).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, NoReturn, Protocol

from megatron_port.core.errors import EnvironmentFault

# The ways into a compiler that a training process has, module by module; ``jit_guard`` closes them.
#
# :data:`ENTRY_POINTS` maps a module to the function that closes its entry points once the module is there.
# Names inside other libraries are feature-tested: torch 2.11 to 2.13 and Triton 3.x do not have all of them.

SWITCH = "backend.allow_jit"
_PERMIT = f"or set {SWITCH} = true to permit compiling at run time"
_OWN_OPS = "`make kernels DEVICE=cuda` (or rocm, cpu) builds this program's own ops, which stand in for it"
_DEVICE_BINARIES = {"cuda": "TORCH_CUDA_ARCH_LIST", "rocm": "PYTORCH_ROCM_ARCH"}


class Guard(Protocol):
    """Guard interface: what the functions here use of :class:`megatron_port.ext.kernels.jit_guard.JitGuard`."""

    on: bool

    def refuse_in(self, owner: Any, name: str, refusing: Callable[..., Any]) -> None:
        """Make ``owner.name`` call ``refusing`` while the guard is on; nothing if there is no such name."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until the guard comes off."""

    def on_removal(self, action: Callable[[], None]) -> None:
        """Call when the guard comes off."""


def refuse(what: str, command: str) -> NoReturn:
    """Raise EnvironmentFault: ``what`` would be compiled, ``command`` builds it ahead of time, and the switch."""
    raise EnvironmentFault(
        f"{what} would be compiled at run time, which is not allowed. Build it ahead of time: {command}; {_PERMIT}"
    )


# ---- DeepSpeed


def _built_switches() -> list[str]:
    """Return the variables of the ops that the installed wheel has: a new build without them would lose them."""
    version = sys.modules.get("deepspeed.git_version_info")
    if version is None:
        return []
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    found = [getattr(ALL_OPS.get(op), "BUILD_VAR", "") for op, built in version.installed_ops.items() if built]
    return [name for name in found if name]


def device_binaries(accelerator: str) -> str:
    """Return ``VARIABLE="archs" `` for the build of a GPU's ops: of the visible GPUs, else of A100, H100 and MI250X."""
    if accelerator != "cuda":
        return ""
    import torch

    kind = "rocm" if torch.version.hip else "cuda"
    default = "gfx90a" if kind == "rocm" else "8.0;9.0"
    found = set()
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(i)
        name = str(getattr(properties, "gcnArchName", "")).split(":")[0]
        found.add(name if kind == "rocm" else f"{properties.major}.{properties.minor}")
    return f'{_DEVICE_BINARIES[kind]}="{";".join(sorted(found - {""})) or default}" '


def prebuild_command(op: str, accelerator: str = "cpu", *, switch: str = "") -> str:
    """Return the command that builds a DeepSpeed op ahead of time, with the ops that are there already.

    Args:
        accelerator: DeepSpeed's name: cpu | cuda (for ROCm too).
        switch: the op's variable, if not DS_BUILD_<OP>.
    """
    first = switch or f"DS_BUILD_{op.upper()}"
    switches = [first, *(name for name in _built_switches() if name != first)]
    version = getattr(sys.modules.get("deepspeed.git_version_info"), "version", "").split("+")[0]
    return (
        f"DS_ACCELERATOR={accelerator} {device_binaries(accelerator)}DS_BUILD_OPS=0 "
        f"{' '.join(f'{name}=1' for name in switches)} pip install --force-reinstall --no-cache-dir "
        f"--no-build-isolation --no-deps --no-binary deepspeed deepspeed{'==' if version else ''}{version}"
    )


def close_deepspeed(guard: Guard, module: ModuleType) -> None:
    """Close ``OpBuilder.jit_load``, on the base class and on the builders that have their own."""

    def refusing(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        from deepspeed.accelerator import get_accelerator

        command = prebuild_command(self.name, get_accelerator()._name, switch=getattr(self, "BUILD_VAR", ""))
        refuse(f"the DeepSpeed op '{self.name}'", command)

    pending = [module.OpBuilder]
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if "jit_load" in vars(cls):
            guard.refuse_in(cls, "jit_load", refusing)


def close_rocm_apex(guard: Guard, module: ModuleType) -> None:
    """Close ROCm's apex, which has DeepSpeed's builder: ``import amp_C`` always succeeds, the first use may compile."""

    def refusing(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"the apex op '{self.name}'", f"{getattr(self, 'BUILD_VAR', 'APEX_BUILD_CUDA_OPS')}=1 pip install "
               "--force-reinstall --no-cache-dir --no-build-isolation --no-deps git+https://github.com/ROCm/apex")

    guard.refuse_in(module.OpBuilder, "jit_load", refusing)


# ---- torch.utils.cpp_extension


def _calling_package() -> str:
    """Return the top-level package of the nearest frame that is neither torch's nor ours; empty for a script."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if name not in ("torch", "megatron_port", "functools", "contextlib", "cutlass"):
            return "" if name == "__main__" else name
        frame = frame.f_back
    return ""


def _install_command(package: str) -> str:
    """Return how to install the package that wanted an extension, with its extensions built."""
    from importlib.metadata import packages_distributions

    name = (packages_distributions().get(package) or ["PACKAGE"])[0] if package else "PACKAGE"
    return f"pip install --force-reinstall --no-cache-dir --no-build-isolation --no-deps --no-binary {name} {name}"


def close_cpp_extension(guard: Guard, module: ModuleType) -> None:
    """Close ``load``, ``load_inline`` and what they call, which a module may have imported by name before."""

    def refusing(name: str = "an extension", *args: Any, **kwargs: Any) -> NoReturn:
        package = _calling_package()
        by = f" of {package}" if package else ""
        refuse(f"the extension '{name}'{by} (torch.utils.cpp_extension)", _install_command(package))

    def refusing_ninja(directory: str = "", *args: Any, **kwargs: Any) -> NoReturn:
        package = _calling_package()
        refuse(f"an extension in {directory} (torch.utils.cpp_extension)", _install_command(package))

    for function in ("load", "load_inline", "_jit_compile", "_write_ninja_file_and_build_library"):
        guard.refuse_in(module, function, refusing)
    guard.refuse_in(module, "_run_ninja_build", refusing_ninja)


# ---- torch.compile, inductor, run-time compilers inside torch


def close_torch(guard: Guard, module: ModuleType) -> None:
    """Close ``torch.compile`` with inductor: decorating is harmless, calling is refused.

    Libraries decorate functions at import that are never called. What was wrapped before the guard fails
    inside dynamo, as BackendCompilerFailed with the same text. TorchScript stays, without its fuser, which
    generates GPU code with NVRTC; the graph is interpreted instead.
    """
    original = module.compile

    @functools.wraps(original)
    def compile_or_refuse(model: Any = None, **options: Any) -> Any:
        if not guard.on or options.get("backend", "inductor") != "inductor":
            return original(model, **options)
        if model is None:
            return lambda function: compile_or_refuse(function, **options)
        name = getattr(model, "__qualname__", type(model).__qualname__)
        if isinstance(model, module.nn.Module):
            refuse(f"the module {name} (torch.compile)", _OWN_OPS)

        @functools.wraps(model)
        def refusing(*args: Any, **kwargs: Any) -> NoReturn:
            refuse(f"the function {name} (torch.compile)", _OWN_OPS)

        return refusing

    guard.replace(module, "compile", compile_or_refuse)
    wrapper = getattr(module, "_TorchCompileInductorWrapper", None)
    if wrapper is not None:
        guard.refuse_in(wrapper, "__call__", _refusing_graph)
    core = module._C
    if getattr(core, "_jit_set_texpr_fuser_enabled", None) and core._jit_texpr_fuser_enabled():
        core._jit_set_texpr_fuser_enabled(False)
        guard.on_removal(lambda: core._jit_set_texpr_fuser_enabled(True))


def _refusing_graph(*args: Any, **kwargs: Any) -> NoReturn:
    refuse("a graph (torch.compile, inductor)", _OWN_OPS)


def close_compile_fx(guard: Guard, module: ModuleType) -> None:
    """Close inductor's entrance, for callers that go around ``torch.compile`` (dynamo by name, AOTInductor)."""
    for function in ("compile_fx", "compile_fx_aot"):
        guard.refuse_in(module, function, _refusing_graph)


def close_cpp_builder(guard: Guard, module: ModuleType) -> None:
    """Close the place where inductor starts the C++ compiler."""

    def refusing(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"the C++ kernel {getattr(self, '_name', '?')} (torch inductor)", _OWN_OPS)

    guard.refuse_in(module.CppBuilder, "build", refusing)


def close_codecache(guard: Guard, module: ModuleType) -> None:
    """Close the place where inductor starts nvcc, hipcc and the like for templates (CUTLASS, Composable Kernel)."""
    for name in ("CUTLASSCodeCache", "CUDACodeCache", "XPUCodeCache", "ROCmCodeCache", "AotCodeCompiler"):
        owner = getattr(module, name, None)
        if owner is not None and "compile" in vars(owner):
            guard.refuse_in(owner, "compile", functools.partial(_refusing_template, name))


def _refusing_template(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    refuse(f"a kernel template (torch inductor, {name})", _OWN_OPS)


def close_cuda_utils(guard: Guard, module: ModuleType) -> None:
    """Close ``torch.cuda._compile_kernel`` (NVRTC, hipRTC)."""

    def refusing(source: str = "", kernel: str = "?", *args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"the kernel '{kernel}' (torch.cuda, NVRTC)", _OWN_OPS)

    guard.refuse_in(module, "_nvrtc_compile", refusing)


def close_jiterator(guard: Guard, module: ModuleType) -> None:
    """Close the jiterator: element-wise kernels given as text."""

    def refusing(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"the kernel '{getattr(self, 'kernel_name', '?')}' (torch.cuda.jiterator)", _OWN_OPS)

    owner = getattr(module, "_JittedFunction", None)
    if owner is not None:
        guard.refuse_in(owner, "__call__", refusing)


def close_native_overrides(guard: Guard, module: ModuleType) -> None:
    """Close the Triton and CuTe kernels, compiled at first use, that replace some of torch 2.13's own CUDA ops.

    (``bmm`` of outer products; RMSNorm, top-k and scatter where nvidia-cutlass-dsl is installed.) They are taken out
    of the dispatcher, so that torch's compiled kernels serve; an ordinary op of a model is nothing to refuse.
    """
    take_out, put_back = (getattr(module, f"{verb}_op_overrides", None) for verb in ("deregister", "reenable"))
    if take_out is None or put_back is None:
        return
    names = ["cutedsl", "triton"]
    take_out(disable_dsl_names=names)
    guard.on_removal(lambda: put_back(enable_dsl_names=names))


# ---- Triton


def close_triton_compiler(guard: Guard, module: ModuleType) -> None:
    """Close Triton's compiler. Kernels in its cache on disk count as not built: no other node has that cache."""

    def refusing(source: Any = None, *args: Any, **kwargs: Any) -> NoReturn:
        kernel = getattr(getattr(source, "fn", None), "__name__", "?")
        refuse(f"the Triton kernel '{kernel}'", _OWN_OPS)

    if "compile" in vars(module):
        guard.refuse_in(module, "compile", refusing)


def close_triton_jit(guard: Guard, module: ModuleType) -> None:
    """Close Triton's JIT: a kernel launched before keeps the compiler it found then, so its step is closed too."""

    def refusing(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"the Triton kernel '{getattr(self, '__name__', '?')}'", _OWN_OPS)

    close_triton_compiler(guard, module)
    owner = getattr(module, "JITFunction", None)
    if owner is not None:
        guard.refuse_in(owner, "_do_compile", refusing)


def close_triton_build(guard: Guard, module: ModuleType) -> None:
    """Close the C compiler, which Triton starts for its driver and for each kernel's launcher."""

    def refusing(name: str = "?", *args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"Triton's C module '{name}'", _OWN_OPS)

    guard.refuse_in(module, "_build", refusing)


def close_cute(guard: Guard, module: ModuleType) -> None:
    """Close CuTe's Python DSL (nvidia-cutlass-dsl), in which FlashAttention-4 and Quack are written."""

    def refusing(*args: Any, **kwargs: Any) -> NoReturn:
        package = _calling_package()
        refuse(f"a CuTe kernel{f' of {package}' if package else ''} (nvidia-cutlass-dsl)", _OWN_OPS)

    if hasattr(module, "Compiler"):
        guard.refuse_in(module.Compiler, "compile", refusing)


def close_mori(guard: Guard, module: ModuleType) -> None:
    """Close MORI's compilers of kernels and of device code; what they have made before is found without them."""

    def refusing(cfg: Any = None, source: Any = "?", *args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"MORI's kernel {source}", 'MORI_PRECOMPILE=1 python -c "import mori", on a node with such a GPU')

    for name in ("_hipcc_genco", "_hipcc_device_bc"):
        guard.refuse_in(module, name, refusing)


ENTRY_POINTS: dict[str, Callable[[Guard, ModuleType], None]] = {
    "apex.op_builder.builder": close_rocm_apex,
    "cutlass.base_dsl.compiler": close_cute,
    "deepspeed.ops.op_builder.builder": close_deepspeed,
    "mori.jit.core": close_mori,
    "torch": close_torch,
    "torch.utils.cpp_extension": close_cpp_extension,
    "torch._inductor.compile_fx": close_compile_fx,
    "torch._inductor.cpp_builder": close_cpp_builder,
    "torch._inductor.codecache": close_codecache,
    "torch._native.registry": close_native_overrides,
    "torch.cuda._utils": close_cuda_utils,
    "torch.cuda.jiterator": close_jiterator,
    "triton": close_triton_compiler,
    "triton.compiler": close_triton_compiler,
    "triton.compiler.compiler": close_triton_compiler,
    "triton.runtime.build": close_triton_build,
    "triton.runtime.jit": close_triton_jit,
}
"""Module → what closes its ways. A module that comes later is closed when it is imported."""


__all__ = ["JitGuard", "Undo", "install_guard", "prebuild_command", "prebuilt_deepspeed_ops"]

Undo = Callable[[], None]


def prebuilt_deepspeed_ops() -> dict[str, bool]:
    """Return op → built ahead of time, for the accelerator that DeepSpeed uses here. Imports deepspeed."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops

    fits = accelerator_name == get_accelerator()._name
    return {op: bool(built) and fits for op, built in installed_ops.items() if op != "deepspeed_not_implemented"}


class _ThenClose(Loader):
    """A module's own loader, and after it the guard."""

    def __init__(self, loader: Loader, then: Callable[[ModuleType], None]) -> None:
        self.loader, self.then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Whoever asks the module for its loader later (inspect, pkgutil) gets the real one.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.then(module)


class JitGuard(MetaPathFinder):
    """Guard that closes ``compile_entry_points.ENTRY_POINTS``, at once in loaded modules, at import in the others.

    It stands in ``sys.meta_path``, which also is where a second :func:`install_guard` finds it: one per process.
    """

    def __init__(self) -> None:
        self.on = False
        self.users = 0
        self._undo: list[Undo] = []

    def install(self) -> None:
        """Close the loaded modules and watch for the others."""
        self.on = True
        sys.meta_path.insert(0, self)
        for name, close in ENTRY_POINTS.items():
            module = sys.modules.get(name)
            if module is not None:
                close(self, module)

    def remove(self) -> None:
        """Put everything back. What others copied from a closed module meanwhile works again too."""
        self.on = False
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._undo:
            self._undo.pop()()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let the others find one of our modules, and close it once it has run."""
        close = ENTRY_POINTS.get(fullname)
        if close is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self or not hasattr(finder, "find_spec") else finder.find_spec(
                fullname, path, target
            )
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _ThenClose(spec.loader, functools.partial(close, self))
                return spec
        return None

    def refuse_in(self, owner: Any, name: str, refusing: Callable[..., Any]) -> None:
        before = getattr(owner, name, None)
        if before is None:
            return

        @functools.wraps(before)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return refusing(*args, **kwargs) if self.on else before(*args, **kwargs)

        bound = isinstance(inspect.getattr_static(owner, name), (classmethod, staticmethod))
        self.replace(owner, name, staticmethod(guarded) if bound else guarded)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        before = inspect.getattr_static(owner, name)
        setattr(owner, name, value)
        self.on_removal(lambda: setattr(owner, name, before))

    def on_removal(self, action: Undo) -> None:
        self._undo.append(action)


def install_guard(allow_jit: bool) -> Undo:
    """Raise EnvironmentFault, with the op's name and the remedy, on attempts to compile an op from now on.

    Args:
        allow_jit: ``backend.allow_jit``; true: nothing is guarded.

    Returns:
        A function that takes this guard off; where several were installed, the last one to go opens the ways.
    """
    if allow_jit:
        return lambda: None
    guard = next((finder for finder in sys.meta_path if isinstance(finder, JitGuard)), None)
    if guard is None:
        guard = JitGuard()
        guard.install()
    guard.users += 1
    left = [guard]

    def remove() -> None:
        for own in left:
            own.users -= 1
            if own.users == 0:
                own.remove()
        left.clear()

    return remove
