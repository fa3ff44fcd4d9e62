"""Names that plugins add: what may be registered, how modules are loaded, and what a user reads when that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_port.core.config.checks import problems
from megatron_port.core.config.loader import load
from megatron_port.core.errors import ConfigError
from megatron_port.core.registry import OPTIMIZERS, REGISTRIES, STEP_PARTS, Registry

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "optimizer"


def python(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Run in a fresh process, where nothing is registered yet."""
    path = ":".join(str(f) for f in (ROOT, *folders))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path, "PATH": "/usr/bin"},
    )


def run_file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(f"{text}\n[data]\nsynthetic = true\n")
    return path


def test_what_may_be_added() -> None:
    registry = Registry("colour", "paint.colour", {"red": "colorsys:rgb_to_hsv", "blue": None})
    assert registry.names == registry.builtin == ("red", "blue")
    registry.add("green-2", 7)
    registry.add("later", "nowhere.at.all:THING")  # not imported before it is used
    assert registry.added == ("green-2", "later") and registry.get("green-2", int) == 7
    with pytest.raises(ConfigError, match="colour 'red' is megatron_port's own"):
        registry.add("red", 1)
    with pytest.raises(ConfigError, match=r"'later' is registered twice, as nowhere.at.all:THING and as builtins:int"):
        registry.add("later", 3)
    for bad in ("", "two words", "9lives", "a/b"):
        with pytest.raises(ConfigError, match="a name has letters"):
            registry.add(bad, 1)
    with pytest.raises(ConfigError, match=r"colour 'green-2' is builtins:int, which is no str"):
        registry.get("green-2", str)
    with pytest.raises(ConfigError, match=r"'later' is said to be 'nowhere.at.all:THING', but ModuleNotFoundError"):
        registry.get("later", int)
    for missing in ("blue", "grey"):
        with pytest.raises(ConfigError, match=rf"paint.colour '{missing}' is unknown here; use red, blue, green-2"):
            registry.get(missing, int)


def test_the_package_finds_its_own() -> None:
    for registry in (*REGISTRIES, STEP_PARTS):
        for name in registry.builtin:
            if registry._builtin[name] is not None:
                assert registry.get(name, object) is not None


def test_a_plugin_is_loaded_before_the_checks_and_without_torch(tmp_path: Path) -> None:
    run = run_file(tmp_path, 'engine = "native"\nplugins = ["signum"]\n[optimizer]\nname = "signum"')
    found = python(
        "import sys; from megatron_port.core.config.loader import load\n"
        "from megatron_port.core.config.checks import problems\n"
        f"config = load({str(run)!r}).config; print(config.plugins, problems(config), 'torch' in sys.modules)\n"
        f"load({str(run)!r})",  # a second time in a process is nothing new
        EXAMPLE,
    )
    assert (found.returncode, found.stdout.strip()) == (0, "('signum',) [] False"), found.stderr
    unloaded = problems(load(None, ["optimizer.name=signum", "engine=native", "data.synthetic=true"]).config)
    known = "adamw, adamw-bf16, adamw-8bit, lion, sgd, adagrad, adafactor, came, sm3, lamb, muon"
    assert unloaded == [f"optimizer.name 'signum' is unknown; use {known}"]


@pytest.mark.parametrize(("source", "says"), [
    (None, "ModuleNotFoundError: No module named 'my_plugin'"),
    ("import nothing_here", "ModuleNotFoundError: No module named 'nothing_here'"),
    ("1 / 0", "ZeroDivisionError: division by zero"),
    ("from megatron_port.core.registry import OPTIMIZERS\nOPTIMIZERS.add('adamw', 1)",
     "'adamw' is megatron_port's own"),
])
def test_a_plugin_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, says: str
) -> None:
    if source is not None:
        (tmp_path / "my_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    run = run_file(tmp_path, 'plugins = ["my_plugin"]')
    with pytest.raises(ConfigError) as error:
        load(run)
    text = str(error.value)
    assert "run.toml:1: plugin 'my_plugin' cannot be loaded" in text and says in text and "PYTHONPATH" in text
    sys.modules.pop("my_plugin", None)


def test_an_entry_point_is_found_where_a_name_is_not_known(tmp_path: Path) -> None:
    info = tmp_path / "signum_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: signum-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[megatron_port.plugins]\nlion = signum\nbroken = not_installed\n")
    code = (
        "from megatron_port.core.config.loader import load\nfrom megatron_port.core.registry import OPTIMIZERS\n"
        "load(None, ['optimizer.name={}'])\nprint(OPTIMIZERS.added)"
    )
    assert python(code.format("adamw"), EXAMPLE, tmp_path).stdout.strip() == "()"  # not even looked at
    broken = python(code.format("signum"), EXAMPLE, tmp_path)
    assert "the installed plugin broken (not_installed) cannot be loaded: ModuleNotFoundError" in broken.stderr
    (info / "entry_points.txt").write_text("[megatron_port.plugins]\nlion = signum\n")
    found = python(code.format("signum"), EXAMPLE, tmp_path)
    assert found.stdout.strip() == "('signum',)", found.stderr


def test_engines_and_providers_that_have_no_update_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS._added, "signum", "signum_rule:SIGNUM")
    deepspeed = problems(load(None, ["optimizer.name=signum", "engine=deepspeed", "data.synthetic=true"]).config)
    assert len(deepspeed) == 1 and "engine deepspeed has no update for optimizer.name 'signum'" in deepspeed[0]
    own = ["optimizer.name=signum", "data.synthetic=true", "engine=native", "backend.optimizer=own"]
    (problem,) = problems(load(None, own).config)
    assert "is an update of adamw, not of optimizer.name 'signum'" in problem
