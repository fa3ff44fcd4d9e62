"""The libraries that the same tests run on: the CPU's own, the device sources in the emulator, and a GPU's."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron_port.core.errors import EnvironmentFault
from megatron_port.ext.kernels import kernels

ROOT = Path(__file__).resolve().parents[2]
EMULATED = ROOT / "build" / "emulated"


def load_build_script() -> ModuleType:
    """kernels/build.py as a module."""
    spec = importlib.util.spec_from_file_location("kernels_build", ROOT / "kernels" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernels_build"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def build_script() -> ModuleType:
    return load_build_script()


def _build(script: ModuleType, *targets: tuple[str, Path]) -> None:
    EMULATED.mkdir(parents=True, exist_ok=True)
    with open(EMULATED / ".lock", "w") as lock:  # one worker builds, the others find it built
        fcntl.flock(lock, fcntl.LOCK_EX)
        for target, out in targets:
            try:
                script.build(script.plan(target, ()), out)
            except script.Missing as error:
                pytest.skip(f"kernels: {target} cannot be built here: {error}")


@pytest.fixture(scope="session")
def own(build_script: ModuleType) -> Path:
    """Folder of the CPU library and the binding, of the sources as they are now; with PREBUILT_KERNELS=1 as they were
    built, on a machine that has no compiler or another one."""
    if os.environ.get("PREBUILT_KERNELS") == "1":
        return kernels.FOLDER
    _build(build_script, ("cpu", kernels.FOLDER), ("binding", kernels.FOLDER))
    return kernels.FOLDER


@pytest.fixture(scope="session")
def built(build_script: ModuleType, own: Path) -> Path:
    """Folder of the emulated libraries; those of ``own`` are there too."""
    _build(build_script, ("emulated", EMULATED))
    return EMULATED


@pytest.fixture(params=["cpu", "emulated32", "emulated64", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, own: Path) -> Iterator[torch.device]:
    """The device whose tensors the own kernels take; each parameter loads another library."""
    if request.param == "gpu":
        if not torch.cuda.is_available():
            pytest.skip("no GPU that torch can use")
        try:
            kernels.load("rocm" if torch.version.hip else "cuda")
        except EnvironmentFault as error:
            pytest.skip(str(error))
        yield torch.device("cuda")
        return
    library = None
    if request.param != "cpu":
        library = request.getfixturevalue("built") / f"libmp_{request.param}.so"
    kernels.load("cpu", library=library)
    yield torch.device("cpu")
    if library is not None:
        kernels.load("cpu")
