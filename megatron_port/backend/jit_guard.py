"""No compilation while training: whatever would build an op at run time stops with the command that prebuilds it.

Ops that were built ahead of time still load. The guard is installed once, before
the engine is made; :func:`install_guard` returns a function that takes it off again.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from megatron_port.errors import EnvironmentFault

Undo = Callable[[], None]

_EXTENSION_REMEDY = "install its package with the extensions built: pip install --no-build-isolation PACKAGE"
_COMPILE_REMEDY = "set backend.allow_compile = true to permit torch.compile and Triton"


def prebuild_command(op: str, accelerator: str = "cpu", *, switch: str = "") -> str:
    """The command that builds a DeepSpeed op ahead of time. ``switch``: its variable, if not DS_BUILD_<OP>."""
    switch = switch or f"DS_BUILD_{op.upper()}"
    return (
        f"DS_ACCELERATOR={accelerator} DS_BUILD_OPS=0 {switch}=1 pip install --force-reinstall --no-cache-dir "
        f"--no-build-isolation --no-deps --no-binary deepspeed deepspeed"
    )


def prepare_deepspeed() -> None:
    """Import deepspeed so that it builds nothing on its own.

    On a CPU ``init_distributed`` would compile ``deepspeed_shm_comm`` (half a minute,
    a compiler needed) for collectives that training never calls; marking the op as
    incompatible makes DeepSpeed go without. A prebuilt one is left alone.

    Raises:
        EnvironmentFault: deepspeed is not installed or cannot be imported.
    """
    try:
        import megatron_port.runtime.deepspeed_import  # noqa: F401, I001
        import deepspeed.ops
        from deepspeed.git_version_info import installed_ops
    except Exception as error:  # deepspeed raises many kinds when its installation does not fit torch
        raise EnvironmentFault(
            f"engine deepspeed cannot be used: import deepspeed failed with {type(error).__name__}: {error}; "
            f"install it (`make setup`) or set engine = \"native\""
        ) from error
    if not installed_ops.get("deepspeed_shm_comm", False):
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def prebuilt_deepspeed_ops() -> dict[str, bool]:
    """Op → built ahead of time for the accelerator that DeepSpeed uses here. Imports deepspeed."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops

    fits = accelerator_name == get_accelerator()._name
    return {op: bool(built) and fits for op, built in installed_ops.items() if op != "deepspeed_not_implemented"}


def _refuse(what: str, remedy: str) -> NoReturn:
    raise EnvironmentFault(f"{what} would be compiled at run time, which is not allowed; {remedy}")


def _replace(owner: Any, name: str, value: Any, undo: list[Undo]) -> None:
    """Set an attribute and remember how to put it back."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    undo.append(lambda: setattr(owner, name, before))


def _guard_extensions(undo: list[Undo]) -> None:
    """torch.utils.cpp_extension: every way into the compiler, by the name of the extension."""
    import torch.utils.cpp_extension as cpp

    def refusing(name: str = "an extension", *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(f"the extension '{name}' (torch.utils.cpp_extension)", _EXTENSION_REMEDY)

    for function in ("load", "load_inline", "_jit_compile"):
        if hasattr(cpp, function):
            _replace(cpp, function, refusing, undo)


def _guard_deepspeed(undo: list[Undo]) -> None:
    """DeepSpeed's own builder, on its base class and on subclasses that override it."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.builder import OpBuilder

    accelerator = get_accelerator()._name

    def refusing(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        command = prebuild_command(self.name, accelerator, switch=getattr(self, "BUILD_VAR", ""))
        _refuse(f"the DeepSpeed op '{self.name}'", "build it ahead of time: " + command)

    pending = [OpBuilder]
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if "jit_load" in vars(cls):
            _replace(cls, "jit_load", refusing, undo)


def _guard_torch_compile(undo: list[Undo]) -> None:
    """torch.compile with inductor: decorating is harmless, calling is refused.

    Libraries decorate functions at import that are never called. What was wrapped before the
    guard fails inside dynamo, as BackendCompilerFailed with the same text.
    """
    import torch

    original = torch.compile

    def compile_or_refuse(model: Any = None, **options: Any) -> Any:
        if options.get("backend", "inductor") != "inductor":
            return original(model, **options)
        if model is None:
            return lambda function: compile_or_refuse(function, **options)
        name = getattr(model, "__qualname__", type(model).__qualname__)
        if isinstance(model, torch.nn.Module):
            _refuse(f"the module {name} (torch.compile)", _COMPILE_REMEDY)

        @functools.wraps(model)
        def refusing(*args: Any, **kwargs: Any) -> NoReturn:
            _refuse(f"the function {name} (torch.compile)", _COMPILE_REMEDY)

        return refusing

    _replace(torch, "compile", compile_or_refuse, undo)
    wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
    if wrapper is not None:
        def refuse_graph(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
            _refuse("a graph (torch.compile)", _COMPILE_REMEDY)

        _replace(wrapper, "__call__", refuse_graph, undo)


def _guard_triton(undo: list[Undo]) -> None:
    """Triton's compiler, under every name that its launcher takes it from."""
    if importlib.util.find_spec("triton") is None:
        return
    for name in ("triton", "triton.compiler"):
        importlib.import_module(name)

    def refusing(source: Any = None, *args: Any, **kwargs: Any) -> NoReturn:
        kernel = getattr(getattr(source, "fn", None), "__name__", "?")
        _refuse(f"the Triton kernel '{kernel}'", _COMPILE_REMEDY)

    for name in ("triton", "triton.compiler", "triton.compiler.compiler", "triton.runtime.jit"):
        owner = sys.modules.get(name)
        if owner is not None and hasattr(owner, "compile"):
            _replace(owner, "compile", refusing, undo)


def install_guard(allow_compile: bool, *, deepspeed: bool | None = None) -> Undo:
    """From now on, attempts to compile an op raise EnvironmentFault with the op's name and the remedy.

    Args:
        allow_compile: leave torch.compile (inductor, Triton) alone; extensions stay guarded.
        deepspeed: guard DeepSpeed's builders too, which imports it; None: only if it is imported already.
            A later import stays safe, since its builders end in the guarded ``cpp_extension.load``.

    Returns:
        A function that removes the guard.
    """
    undo: list[Undo] = []
    _guard_extensions(undo)
    if deepspeed or (deepspeed is None and "deepspeed" in sys.modules):
        _guard_deepspeed(undo)
    if not allow_compile:
        _guard_torch_compile(undo)
        _guard_triton(undo)

    def remove() -> None:
        while undo:
            undo.pop()()

    return remove
