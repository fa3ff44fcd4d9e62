"""Tables of conflicts: one formatter writes their sentences. And sections that plugins register, held to both."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from contradictions import contradictions

from megatron_port.core.config.conflicts import Above, Conflict, Rule, Table, native_only
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.registry import CONFLICTS

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = next(
    block for block in (ROOT / "CONTRIBUTING.md").read_text().split("```python\n")[1:] if "SECTIONS.add(" in block
).partition("```")[0]


@pytest.mark.parametrize(("row", "changes", "sentence"), [
    (native_only("which has none"), {"engine": "deepspeed"},
     'x 24 with engine "deepspeed", which has none; use engine = "native"'),
    (Conflict("layout.zero_stage", "it is {c.layout.zero_stage}", "use {c.batch.global_batch_size}", refused=(1,)), {},
     "x 24 with layout.zero_stage 1: it is 1; use 8"),
    (Conflict("data.synthetic"), {"data.synthetic": True}, "x 24 with data.synthetic"),
    (Conflict("model.parallel_residual", "why", refused=(False,), needs="parallel_residual = true"), {},
     "x 24 needs parallel_residual = true: why"),
    (Conflict("data.train", "whose names are read", when=lambda c: len(c.data.train) == 2),
     {"data.train": ("{a}", "b")}, "x 24 with data.train ['{a}', 'b'], whose names are read"),
    (Above("model.seq_length", "model.num_layers"), {}, "model.seq_length 1024 is above num_layers 24; use at most 24"),
    (Above("model.seq_length", "batch.global_batch_size"), {},
     "model.seq_length 1024 is above batch.global_batch_size 8; use at most 8"),
    (Rule(lambda c: c.seed, "{asked} has seed {c.seed}"), {}, "x 24 has seed 1234"),
])
def test_a_row_is_a_sentence(row: Conflict | Above | Rule, changes: dict[str, object], sentence: str) -> None:
    config = with_values(RunConfig(), {"model.num_layers": 24, "model.seq_length": 1024, **changes})
    table = Table(asked="x {c.model.num_layers}", on=lambda c: c.model.num_layers, rows=(row,))
    assert contradictions((table,), config) == [sentence]
    assert contradictions((Table(rows=(row,), on=lambda c: False),), config) == []


@pytest.mark.parametrize("row", [
    native_only(), Conflict("layout.zero_stage", refused=(2, 3)), Conflict("data.synthetic"),
    Conflict("layout.zero_stage", refused=(1,), when=lambda c: c.seed == 0), Above("seed", "seed"),
])
def test_a_row_that_is_not_contradicted_says_nothing(row: Conflict | Above) -> None:
    assert contradictions((Table(rows=(row,)),), RunConfig()) == []


@pytest.mark.parametrize("name", CONFLICTS.names)
def test_every_setting_of_the_tables_exists(name: str) -> None:
    """And no sentence of a row fails to be formatted, whether it applies or not."""
    for table in CONFLICTS.get(name, tuple):
        asked = table.asked if isinstance(table.asked, str) else "asked"
        for row in table.rows:
            assert row.sentence(RunConfig(), asked.format(c=RunConfig()), table.link)


def test_a_plain_configuration_imports_no_table_of_a_feature() -> None:
    code = """import sys
from megatron_port.core.config.checks import problems, tables_of
from megatron_port.core.config.schema import RunConfig
assert problems(RunConfig()) and len(list(tables_of(RunConfig()))) == 4  # those of every run
print([name for name in sys.modules if name.endswith("settings") or ".ext." in name])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def python(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the plugin of CONTRIBUTING.md; in a process of its own, which it stays registered in."""
    (folder / "depth_plugin.py").write_text(PLUGIN)
    head = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]\n" + textwrap.dedent("""
        from megatron_port.core.config.checks import problems
        from megatron_port.run.config_hash import config_hash
        from megatron_port.core.config.dump import to_toml
        from megatron_port.core.config.loader import load
        from megatron_port.core.config.schema import RunConfig
        from megatron_port.core.errors import ConfigError

        def made(*sets):
            return load(None, ['plugins=["depth_plugin"]', "data.synthetic=true", *sets]).config

        def refused(*sets):
            try:
                made(*sets)
            except ConfigError as error:
                return str(error)
    """)
    return subprocess.run([sys.executable, "-c", head + textwrap.dedent(code)], capture_output=True, text=True,
                          timeout=60, check=False)


def test_a_plugin_brings_a_section_with_ranges_and_conflicts(tmp_path: Path) -> None:
    done = python(tmp_path, """
        config = made("stochastic_depth.rate=0.1")
        assert isinstance(config, RunConfig) and config.stochastic_depth.rate == 0.1 and not problems(config)
        assert problems(made("stochastic_depth.rate=0.1", "engine=deepspeed")) == [
            'stochastic_depth.rate 0.1 with engine "deepspeed", which runs every layer; use engine = "native"']
        assert problems(made("stochastic_depth.rate=1.5")) == [
            "stochastic_depth.rate is 1.5; it must be at least 0 and below 1"]
        assert not problems(made("engine=deepspeed"))  # the section is at its default
        assert refused("stochastic_depth.rats=1") == "--set: unknown key 'stochastic_depth.rats'; did you mean 'rate'?"
        assert "must be a number" in refused("stochastic_depth.rate=x")
        assert "unknown key 'stochastic_death'; did you mean 'stochastic_depth'?" in refused("stochastic_death.rate=1")
        plain = made()
        assert config_hash(plain) == config_hash(load(None, ["data.synthetic=true"]).config) != config_hash(config)
        assert load("run.toml", texts={"run.toml": to_toml(config)}).config == config
        assert type(load(None).config) is RunConfig and len(problems(RunConfig())) == 1  # other runs of the process
        print("torch" in sys.modules)
    """)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize(("more", "says"), [
    ('SECTIONS.add("model", StochasticDepth)', "section 'model' is megatron_port's own"),
    ('SECTIONS.add("mutable", dict)', "section 'mutable': dict must be a frozen dataclass"),
])
def test_a_section_that_cannot_be_one_is_named(tmp_path: Path, more: str, says: str) -> None:
    done = python(tmp_path, f"""
        import depth_plugin
        from depth_plugin import SECTIONS, StochasticDepth
        {more}
        print(refused())
    """)
    assert done.returncode == 0 and says in done.stdout, done.stderr


def test_a_table_that_is_nobodys_is_an_unknown_key(tmp_path: Path) -> None:
    done = python(tmp_path, """
        try:
            load(None, ["stochastic_depth.rate=0.1"])
        except ConfigError as error:
            print(error)
    """)
    assert done.stdout == "--set: unknown key 'stochastic_depth'\n", done.stderr
