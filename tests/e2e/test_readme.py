"""The README: "Your own run", typed as it is there, as far as one machine without a GPU or SLURM can go."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from megatron_port.cli.main import main
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.tokenizer import gpt2_directory

ROOT = Path(__file__).resolve().parents[2]


def block() -> str:
    """The shell block of the section."""
    section = (ROOT / "README.md").read_text().partition("\n## Your own run\n")[2].partition("\n## ")[0]
    found = re.search(r"```sh\n(.*?)```", section, re.S)
    assert found
    return found.group(1)


def commands() -> list[list[str]]:
    """Words of each ``megatron-port`` command, comments left out, and the training on eight GPUs."""
    lines = re.sub(r"^cat >.*?^EOF$", "", block(), flags=re.S | re.M).splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [w[1:] for w in words if w and w[0] == "megatron-port" and "--nproc" not in w]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a user who has texts/ and mine.toml."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "texts").mkdir()
    pages = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "megatron_port").rglob("*.py"))]
    (folder / "texts" / "a.txt").write_text("\n".join(page.read_text() for page in pages[:60]))
    (folder / "mine.toml").write_text(re.search(r"^cat > mine.toml <<'EOF'\n(.*?)^EOF$", block(), re.S | re.M).group(1))  # type: ignore[union-attr]
    return folder


def test_the_commands_of_your_own_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        gpt2_directory()
    except DataError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(project)
    found = commands()
    assert [words[0] for words in found] == ["data", "plan", "train", "launch"]
    for words in found:
        if words[:2] == ["launch", "submit"]:
            words = [*words, "--dry-run"]  # there is no sbatch to take it
        code = main(words)
        said = capsys.readouterr()
        assert code == 0, f"{' '.join(words)}\n{said.out[-2000:]}{said.err[-2000:]}"
    assert main(["config", "show", "mine.toml", "--origin"]) == 0
    shown = capsys.readouterr().out
    assert "configs/models/gpt2-124m.toml" in shown
    assert main(["launch", "render", "mine.toml", "--set", "cluster.nodes=4"]) == 0
    assert "#SBATCH --nodes=4" in capsys.readouterr().out

LOG = """....
8201 passed, 732 skipped, 1 warning in 896.27s (0:14:56)
  distributed    350 tests   817.1 s
  gpu              0 tests     0.0 s
  unit          6238 tests   650.1 s
skipped:
  457 × no GPU that torch can use
  258 × longer than a minute; SLOW=1 runs it
  1 × datatrove is not installed
total 15.3 min
ruff: ok (0 s)
mypy: ok (63 s)
readability: ok (1 s)
"""


def test_the_end_of_a_run_of_the_tests_goes_into_readme() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    import readme_output

    lines = readme_output.excerpt(LOG).splitlines()
    assert lines[0].startswith("8201 passed") and lines[-1] == "readability: ok (1 s)"
    assert [line.split()[0] for line in lines[1:7]] == ["distributed", "unit", "skipped:", "457", "258", "…"]
    for bad in (LOG.replace("8201 passed", "1 failed, 8200 passed"), LOG.replace("mypy: ok", "mypy: complains"), ""):
        with pytest.raises(ValueError, match="failed in this run|the log has"):
            readme_output.excerpt(bad)
    assert readme_output.BLOCK.search((ROOT / "README.md").read_text())
