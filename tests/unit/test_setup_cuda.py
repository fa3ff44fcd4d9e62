"""scripts/setup_cuda.py: the CUDA toolkit that DEVICE=cuda builds with, judged before anything is downloaded."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import setup_cuda as cuda  # noqa: E402

COMPILER = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
--dryrun) echo '#$ _HERE_={home}/bin' >&2; echo '#$ TOP={home}/bin/..' >&2 ;;
*) exit 1 ;;
esac
"""


def load_setup() -> ModuleType:
    """``scripts/setup.py``: by its path, as the folder above has a module of that name."""
    spec = importlib.util.spec_from_file_location("setup_of_cuda", ROOT / "scripts" / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["setup_of_cuda"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def toolkit(home: Path, version: str = "13.0", *, without: str = "", library: str = "lib64") -> Path:
    """A toolkit's files, with a compiler that answers as nvcc does."""
    script(home / "bin" / "nvcc", COMPILER.format(version=version, home=home))
    for name in (*cuda.HEADERS, *cuda.LIBRARY_HEADERS):
        if name != without:
            (home / "include" / name).parent.mkdir(parents=True, exist_ok=True)
            (home / "include" / name).touch()
    if without != "libcudart.so":
        (home / library).mkdir(exist_ok=True)
        (home / library / "libcudart.so").touch()
    return home


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def found(environment: dict[str, str], nvcc: Path | None, **more: Any) -> Any:
    options = {"wanted": "13.0", "pip_headers": False, **more}
    return cuda.find_toolkit(environment, str(nvcc) if nvcc else None, **options)


def test_a_wrapper_in_path_leads_to_the_toolkit_that_it_calls(tmp_path: Path) -> None:
    """Two levels above the wrapper is no toolkit: /usr/local has no cusparse.h, and the build failed after minutes."""
    home = toolkit(tmp_path / "cuda-13.0")
    wrapper = script(tmp_path / "local" / "bin" / "nvcc", f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    assert found({}, wrapper) == cuda.Toolkit(home, "13.0")


def test_a_link_in_path_leads_to_its_toolkit(tmp_path: Path) -> None:
    home = toolkit(tmp_path / "cuda")
    link = tmp_path / "bin" / "nvcc"
    link.parent.mkdir()
    link.symlink_to(home / "bin" / "nvcc")
    assert found({}, link).home == home
    quiet = script(home / "bin" / "nvcc", '#!/bin/sh\n[ "$1" = --version ] && echo "release 13.0, V13.0.88"\n')
    assert quiet.exists() and found({}, link).home == home  # one that knows no --dryrun


@pytest.mark.parametrize("name", [*cuda.HEADERS, *cuda.LIBRARY_HEADERS, "libcudart.so"])
def test_what_a_toolkit_lacks_is_named(name: str, tmp_path: Path) -> None:
    home = toolkit(tmp_path / "cuda", without=name)
    (problem,) = found({"CUDA_HOME": str(home)}, None)
    assert name in problem and f"{home} (CUDA_HOME)" in problem


def test_torch_s_own_packages_bring_headers_of_libraries_but_not_the_compiler_s(tmp_path: Path) -> None:
    home = toolkit(tmp_path / "a", without="cusparse.h")
    assert found({"CUDA_HOME": str(home)}, None, pip_headers=True) == cuda.Toolkit(home, "13.0", ("cusparse.h",))
    bare = toolkit(tmp_path / "b", without="cuda_runtime.h")
    assert "no cuda_runtime.h in include/" in found({"CUDA_HOME": str(bare)}, None, pip_headers=True)[0]
    elsewhere = tmp_path / "math" / "include"
    elsewhere.mkdir(parents=True)
    (elsewhere / "cusparse.h").touch()
    assert found({"CUDA_HOME": str(home), "CPATH": f"/nowhere:{elsewhere}"}, None).borrowed == ()


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [("13.0", "13.0", True), ("13.1", "13.0", False), ("12.9", "13.0", False), ("12.4", "12.6", True),
     ("12.6", "", True), ("11.8", "12.6", False)],
)
def test_the_release_must_be_torch_s(version: str, wanted: str, fits: bool, tmp_path: Path) -> None:
    """DeepSpeed refuses another release, and accepts any of CUDA 11 or of CUDA 12 for its own."""
    home = toolkit(tmp_path / "cuda", version)
    answer = found({"CUDA_HOME": str(home)}, None, wanted=wanted)
    assert isinstance(answer, cuda.Toolkit) == fits
    if not fits:
        assert f"its release is {version}, torch's is {wanted}" in answer[0]
        skipped = found({"CUDA_HOME": str(home), "DS_SKIP_CUDA_CHECK": "1"}, None, wanted=wanted)
        assert isinstance(skipped, cuda.Toolkit)


def test_cuda_home_is_taken_at_its_word(tmp_path: Path) -> None:
    """What the user named is judged; a whole toolkit elsewhere is not taken in its place."""
    good = toolkit(tmp_path / "good")
    (problem,) = found({"CUDA_HOME": str(tmp_path / "none")}, good / "bin" / "nvcc")
    assert problem == f"{tmp_path / 'none'} (CUDA_HOME): no bin/nvcc"
    assert found({"CUDA_PATH": str(good)}, None).home == good
    broken = script(tmp_path / "broken" / "bin" / "nvcc", "#!/bin/sh\nexit 127\n")
    assert "bin/nvcc does not run" in found({"CUDA_HOME": str(broken.parents[1])}, None)[0]


def test_lib_serves_where_there_is_no_lib64(tmp_path: Path) -> None:
    assert found({"CUDA_HOME": str(toolkit(tmp_path / "cuda", library="lib"))}, None).version == "13.0"


def test_the_message_lists_what_was_tried(tmp_path: Path) -> None:
    wrapper = script(tmp_path / "bin" / "nvcc", "#!/bin/sh\nexit 0\n")
    problems = cuda.find_toolkit({"CUDA_HOME": str(wrapper.parents[1])}, None, wanted="13.0", pip_headers=True)
    assert isinstance(problems, list)
    text = cuda.advice(problems, "13.0")
    for words in ("no whole toolkit of CUDA 13.0", "does not run", "Nothing was downloaded", "CUDA_HOME", "lib64/"):
        assert words in text
    assert "downloaded" not in cuda.advice(problems, "13.0", downloaded=True)


def test_torch_s_release_is_known_before_it_is_downloaded(tmp_path: Path) -> None:
    for version in ("2.11.0", "2.12.0", "2.13.0"):
        assert cuda.torch_cuda(version, "", ROOT / "constraints" / f"torch-{version}.txt") == "13.0"
    nothing = tmp_path / "none.txt"
    assert cuda.torch_cuda("2.13.0", "https://download.pytorch.org/whl/cu126", nothing) == "12.6"
    assert cuda.torch_cuda("2.13.0", "https://download.pytorch.org/whl/cpu", nothing) == ""
    (tmp_path / "torch-2.13.0+cu129-cp311-cp311-linux_x86_64.whl").touch()
    assert cuda.torch_cuda("2.13.0", str(tmp_path), nothing) == "12.9" and cuda.torch_cuda("2.13.0", "", nothing) == ""


def test_headers_of_pip_come_behind_the_user_s(tmp_path: Path) -> None:
    for name in ("nvidia/cu13/include", "nvidia/cusparse/include", "torch/include"):
        (tmp_path / name).mkdir(parents=True)
    folders = cuda.pip_folders(tmp_path)
    assert [str(f.relative_to(tmp_path)) for f in folders] == ["nvidia/cu13/include", "nvidia/cusparse/include"]
    assert cuda.with_headers({"CPATH": "/site"}, folders)["CPATH"].split(":") == ["/site", *map(str, folders)]
    assert cuda.with_headers({}, []) == {}


@pytest.mark.parametrize(("device", "file"), [("cuda", "dev/nvidia0"), ("cuda", "dev/dxg"), ("rocm", "dev/kfd")])
def test_a_gpu_is_seen_by_its_driver_s_files(device: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()  # the driver without a GPU
    assert f"DEVICE={device}, but this machine has no GPU" in cuda.gpu_missing(device, tmp_path)
    (tmp_path / file).touch()
    assert cuda.gpu_missing(device, tmp_path) == "" == cuda.gpu_missing("cpu", tmp_path)


def test_setup_stops_before_its_first_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of torch is downloaded where its op could not be compiled."""
    script_module = load_setup()

    monkeypatch.setattr(script_module, "ROOT", tmp_path)
    monkeypatch.setattr(script_module, "check_machine", lambda *_, **__: None)
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", without="libcudart.so")))
    run = script_module.Setup(device="cuda", torch_version="2.13.0", torch_index="")
    with pytest.raises(SystemExit) as stopped:
        run.all()
    assert stopped.value.code == 3 and "no libcudart.so in lib/" in capsys.readouterr().err
    assert not (tmp_path / ".venv").exists()
    with pytest.raises(SystemExit):
        script_module.main(["--device", "cuda", "--check"])
    assert "no libcudart.so" in capsys.readouterr().err


def test_what_trains_needs_the_device_and_what_installs_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script_module = load_setup()

    monkeypatch.setattr(script_module, "gpu_missing", lambda device: "no GPU here" if device == "cuda" else "")
    with pytest.raises(SystemExit) as stopped:
        script_module.main(["--device", "cuda", "--needs-device"])
    assert stopped.value.code == 3 and "no GPU here. Nothing was downloaded" in capsys.readouterr().err
    text = (ROOT / "Makefile").read_text()
    assert re.search(r"^quickstart gpu-check: NEEDS := --needs-device$", text, re.M) and "$(NEEDS)" in text


def test_images_copy_every_module_that_setup_imports() -> None:
    """Images run setup.py before the sources are copied."""
    imported = set()
    for name in ("setup", "setup_cuda", "setup_machine", "setup_ops"):
        text = (ROOT / "scripts" / f"{name}.py").read_text()
        imported |= {name, *re.findall(r"^(?:from|import) (setup_\w+)", text, re.M)}
    for path in (ROOT / "docker").glob("*.Dockerfile"):
        copied = re.search(r"^COPY (scripts/.*) scripts/$", path.read_text(), re.M)
        assert copied and {Path(p).stem for p in copied.group(1).split()} == imported, path.name


@pytest.mark.skipif(not os.access("/usr/local/cuda/bin/nvcc", os.X_OK), reason="no CUDA toolkit in /usr/local/cuda")
def test_a_real_compiler_says_where_it_is() -> None:
    assert cuda.home_of("/usr/local/cuda/bin/nvcc") == Path("/usr/local/cuda").resolve()
    assert re.fullmatch(r"\d+\.\d+", cuda.version_of("/usr/local/cuda/bin/nvcc"))
