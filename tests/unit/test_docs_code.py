"""Every code block of README and docs/ is parsed or run: commands, run files, Python."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_port.cli.main import COMMANDS, _top_parser, command_of
from megatron_port.core.config.loader import load

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")),
         *sorted((ROOT / "benchmarks" / "evidence").glob("*.md"))]
LANGUAGES = {"sh", "toml", "python", "text"}
OTHERS = {
    ".", "apt-get", "bash", "bsub", "cat", "cd", "debootstrap", "docker", "done", "echo", "export", "flux", "for",
    "gdb", "getent", "git", "ip", "kubectl", "less", "mkdocs", "module", "pip", "podman-hpc", "pre-commit", "py-spy",
    "pytest", "qsub", "sacct", "sbatch", "scancel", "scp", "sha256sum", "singularity", "sky", "squeue", "srun", "ssh",
    "sudo", "tar",
}
"""Programs of others that the pages call."""
IMPORTED = "[model]\nvocab_size = 257\n"


def fences(text: str) -> list[tuple[int, str, str]]:
    """``(line, language, body)`` of each code block."""
    found, lines = [], text.splitlines()
    at = 0
    while at < len(lines):
        opened = re.match(r"( *)```(\w*)$", lines[at])
        if opened:
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
            indent = len(opened.group(1))
            found.append((at + 1, opened.group(2), "".join(line[indent:] + "\n" for line in lines[at + 1 : end])))
            at = end
        at += 1
    return found


BLOCKS = [(f"{page.name}:{line}", language, body) for page in PAGES for line, language, body in
          fences(page.read_text(encoding="utf-8"))]


def of(language: str) -> list[object]:
    return [pytest.param(body, id=place) for place, said, body in BLOCKS if said == language]


def calls(body: str) -> Iterator[list[str]]:
    """The words of each command of a shell block, without redirections and variables in front."""
    body = re.sub(r"<<'EOF'\n.*?^EOF$", "", body, flags=re.S | re.M)
    body = re.sub(r"\\\n", " ", body)
    body = re.sub(r"bash -c '.*?'", "bash", body, flags=re.S)
    for line in body.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        words, call = list(lexer), []
        for word in [*words, ";"]:
            if set(word) <= set(";&|<>"):
                if call:
                    yield call
                call = []
                if word.startswith(">"):
                    call = ["cat"]  # a file's name follows
            elif call or not re.match(r"\w+=", word):
                call.append(word)


def parse_command(words: list[str]) -> list[str]:
    """Parse the words of ``megatron-port`` as it does; return its overrides."""
    words = command_of(words)
    assert words[0] in COMMANDS, words
    parser = _top_parser()
    module = importlib.import_module(f"megatron_port.cli.{words[0]}")
    module.add_parser(parser.add_subparsers(dest="command"))
    if "--" in words:
        words = words[: words.index("--")]
    if "--help" in words:
        return []
    return list(getattr(parser.parse_args(words), "overrides", []))


def check_script(path: Path, options: list[str]) -> None:
    """The script is there and its source knows the options."""
    assert path.is_file(), path
    source = path.read_text(encoding="utf-8")
    near = path.parent.glob("*.py")
    known = source + "".join(other.read_text(encoding="utf-8") for other in near)
    for option in options:
        if option.startswith("--"):
            assert option.partition("=")[0] in known, f"{path.name} has no {option}"


def check_python(words: list[str]) -> None:
    """``python FILE …`` or ``python -m MODULE …``."""
    if words[0] == "-m":
        if words[1] == "megatron_port":
            parse_command(words[2:])
        elif words[1].startswith(("benchmarks", "tests", "scripts")):
            path = ROOT / Path(*words[1].split("."))
            check_script(path / "__main__.py" if path.is_dir() else path.with_suffix(".py"), words[2:])
    elif words[0].endswith(".py"):
        check_script(ROOT / words[0], words[1:])


def check_make(words: list[str]) -> None:
    """Targets and variables are the Makefile's."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, is_variable, _ = word.partition("=")
        assert re.search(rf"^{name} \?=" if is_variable else rf"^{name}:", text, re.M), word


def check_call(words: list[str]) -> list[str]:
    """Check one command; return the overrides that it gives."""
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if program in ("srun", "torchrun", "docker"):
        for name in ("megatron-port", "megatron_port"):
            if name in rest and "-t" not in rest[: rest.index(name)][-1:]:
                return parse_command(rest[rest.index(name) + 1 :])
    if program == "sbatch":
        rest = [word for word in rest if word.endswith(".sh")]
        assert all((ROOT / word).is_file() for word in rest)
    elif program == "megatron-port":
        return parse_command(rest)
    elif program == "make":
        check_make(rest)
    elif program in ("python", "python3"):
        check_python(rest)
    elif program.startswith(("launch/", "scripts/")):
        assert (ROOT / program).is_file(), program
    else:
        assert program in OTHERS or program == "torchrun", f"{program} is not a program that a page may call"
    return []


def test_every_block_names_its_language() -> None:
    assert not [place for place, language, _ in BLOCKS if language not in LANGUAGES]
    assert len(BLOCKS) > 80


@pytest.mark.parametrize("body", of("sh"))
def test_shell_blocks_call_what_is_there(body: str) -> None:
    bash = shutil.which("bash")
    if bash:
        assert subprocess.run([bash, "-n"], input=body, text=True, capture_output=True, check=False).returncode == 0
    overrides = [override for words in calls(body) for override in check_call(words)]
    for override in overrides:
        load(None, [override])


@pytest.mark.parametrize("body", of("toml"))
def test_run_files_load(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "[project." in body:
        pytest.skip("a part of pyproject.toml")
    monkeypatch.chdir(tmp_path)
    for name in ("imported/model.toml", "OUT/model.toml", "mysite.toml", "configs"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if name == "configs":
            path.symlink_to(ROOT / "configs")
        else:
            path.write_text(IMPORTED if "model" in name else "")
    (tmp_path / "run.toml").write_text(body, encoding="utf-8")
    assert load("run.toml", []).config.model.vocab_size > 1


@pytest.mark.parametrize("body", of("python"))
def test_python_blocks_compile_and_import_what_is_there(body: str) -> None:
    for node in ast.walk(compile(body, "block", "exec", ast.PyCF_ONLY_AST)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module.startswith("megatron_port"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), node.module
            else:
                assert importlib.util.find_spec(node.module.partition(".")[0]), node.module


def test_wrong_blocks_are_found() -> None:
    """What the checks are there for."""
    for wrong in (["megatron-port", "train", "--nprocs", "2"], ["megatron-port", "trian"], ["make", "tset"],
                  ["python", "benchmarks/none.py"], ["python", "-m", "benchmarks.compare", "--no-such"],
                  ["frobnicate"]):
        with pytest.raises((AssertionError, SystemExit)):
            check_call(wrong)
    assert [words[0] for words in calls("A=1 make x && python y.py  # note\ncat > f <<'EOF'\nrubbish (\nEOF\n")] == [
        "make", "python", "cat", "cat"]
