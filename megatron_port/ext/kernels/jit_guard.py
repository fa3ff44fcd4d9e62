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
from types import ModuleType
from typing import Any

from megatron_port.ext.kernels.compile_entry_points import ENTRY_POINTS, prebuild_command

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
