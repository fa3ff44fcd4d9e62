"""The command line: exit codes, one rank that prints, and 200 damaged run files."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_port.cli import main as cli
from megatron_port.cli.main import main
from megatron_port.core.config.checks import topology_sizes
from megatron_port.core.config.choices import CHOICES
from megatron_port.core.config.dump import leaves, to_toml
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import EXIT_CONFIG, DataError
from megatron_port.run.launchers import is_rank_zero

WORLDS = {"runs/quickstart": 8, "runs/frontier-22b": 16, "runs/frontier-1t": 3072, "runs/gpt2-124m-1gpu": 1}
LEAVES = dict(leaves(RunConfig()))
SIZES = (
    "model.num_layers", "model.hidden_size", "model.num_attention_heads", "model.vocab_size", "model.seq_length",
    "layout.tensor_parallel_size", "layout.pipeline_parallel_size", "batch.micro_batch_size",
    "batch.global_batch_size", "training.steps", "cluster.gpus_per_node",
)

Mutation = tuple[str, list[str]]
"""(new text of the run file, words that the message must hold)"""


def edit(text: str, name: str, line: str) -> str:
    """The resolved TOML with the line of one leaf replaced."""
    table, _, key = name.rpartition(".")
    out, here = [], ""
    for old in text.splitlines():
        if old.startswith("["):
            here = old.strip("[]")
        out.append(line if here == table and old.startswith(f"{key} = ") else old)
    assert "\n".join(out) != text.rstrip("\n"), name
    return "\n".join(out) + "\n"


def wrong_type(rng: random.Random, text: str, config: Any) -> Mutation:
    name = rng.choice([n for n in LEAVES if n != "launch.time"])  # which may be a number of minutes
    key, value = name.rpartition(".")[2], LEAVES[name]
    number = "true" if name == "launch.time" else "3"  # three minutes, there
    bad = rng.choice(["{}", "[[1]]", "1979-05-27"] + ([number] if isinstance(value, (str, bool)) else ['"3"']))
    return edit(text, name, f"{key} = {bad}"), [name, "must be"]


def misspelt(rng: random.Random, text: str, config: Any) -> Mutation:
    name = rng.choice([n for n in LEAVES if len(n.rpartition(".")[2]) > 5])
    key = name.rpartition(".")[2]
    at = rng.randrange(1, len(key) - 1)
    wrong = key[:at] + key[at + 1 :]
    return edit(text, name, f"{wrong} = 1"), [f"unknown key {(name[: -len(key)] + wrong)!r}", "did you mean", key]


def unknown(rng: random.Random, text: str, config: Any) -> Mutation:
    key = "q" + "".join(rng.choice("xzqj") for _ in range(6))
    table = rng.choice(["model", "layout", "batch", "data"])
    return text.replace(f"[{table}]\n", f"[{table}]\n{key} = {rng.randrange(9)}\n"), [f"unknown key '{table}.{key}'"]


def too_small(rng: random.Random, text: str, config: Any) -> Mutation:
    name, bad = rng.choice(SIZES), rng.choice([0, -1, -8])
    return edit(text, name, f"{name.rpartition('.')[2]} = {bad}"), [name, str(bad), "at least 1"]


def bad_float(rng: random.Random, text: str, config: Any) -> Mutation:
    name, bad = rng.choice([
        ("optimizer.lr", "-0.5"), ("optimizer.beta1", "1.5"), ("optimizer.beta2", "-0.25"), ("optimizer.eps", "0.0"),
        ("model.hidden_dropout", "1.0"), ("model.attention_dropout", "-0.125"), ("optimizer.clip_grad", "-1.0"),
        ("optimizer.weight_decay", "-0.75"), ("precision.initial_loss_scale", "0.0"), ("model.norm_epsilon", "-1e-05"),
    ])
    return edit(text, name, f"{name.rpartition('.')[2]} = {bad}"), [f"{name} is {bad}"]


def bad_choice(rng: random.Random, text: str, config: Any) -> Mutation:
    name = rng.choice(list(CHOICES))
    bad = '"nothing"' if isinstance(CHOICES[name][0], str) else str(max(map(int, CHOICES[name])) + 1)
    return edit(text, name, f"{name.rpartition('.')[2]} = {bad}"), [name, bad.strip('"'), str(CHOICES[name][0])]


def indivisible(rng: random.Random, text: str, config: RunConfig) -> Mutation:
    m, layout = config.model, config.layout
    name, bad = rng.choice([
        ("layout.tensor_parallel_size", rng.choice([5, 7, 11])),
        ("layout.pipeline_parallel_size", m.num_layers + rng.randrange(1, 9)),
        ("layout.data_parallel_size", layout.data_parallel_size + rng.choice([1, 2, 5])),
        ("model.num_attention_heads", rng.choice([7, 11, 13])),
        ("model.num_query_groups", m.num_attention_heads - 1),
        ("layout.pipeline_split", [m.num_layers + 1]),
        ("batch.rampup_start", config.batch.global_batch_size * 2),
    ])
    shown = str(bad).strip("[]")
    return edit(text, name, f"{name.rpartition('.')[2]} = {bad}"), [
        name.rpartition(".")[2], shown, "The nearest layout that is legal: tensor_parallel_size",
    ]


def odd_batch(rng: random.Random, text: str, config: RunConfig) -> Mutation:
    if config.layout.data_parallel_size * config.batch.micro_batch_size == 1:
        return indivisible(rng, text, config)
    bad = config.batch.global_batch_size + 1
    return edit(text, "batch.global_batch_size", f"global_batch_size = {bad}"), [
        f"global_batch_size {bad} does not divide by", f"data_parallel_size {config.layout.data_parallel_size}",
    ]


def broken(rng: random.Random, text: str, config: Any) -> Mutation:
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    lines.insert(at, rng.choice(["= 3", "[model", 'name = "x', "seed = 1 2", "seed == 3", "[[model]]]"]))
    return "\n".join(lines) + "\n", ["run.toml: cannot be read as TOML"]


def base(rng: random.Random, text: str, config: Any) -> Mutation:
    return rng.choice(['extends = "run"\n', 'extends = "nowhere"\n', "extends = 3\n"]) + text, ["run.toml:1: "]


def contradiction(rng: random.Random, text: str, config: RunConfig) -> Mutation:
    steps = config.training.steps
    name, bad, words = rng.choice([
        ("data.split", "[0.5, 0.5, 0.5]", "sums to 1.5"),
        ("data.split", "[0.9]", "sums to 0.9"),
        ("optimizer.warmup_steps", str(steps + 3), f"warmup_steps {steps + 3}"),
        ("optimizer.min_lr", "7.5", "min_lr 7.5"),
        ("layout.zero_stage", "0", "zero_stage 0"),
        ("layout.virtual_pipeline_size", "2", "virtual_pipeline_size 2"),
        ("precision.dtype", '"fp64"', "fp64"),
        ("layout.pipeline_schedule", '"zb-v"', "folds two chunks onto each stage"),
    ])
    of_deepspeed = text.replace('engine = "native"', 'engine = "deepspeed"')
    return edit(of_deepspeed, name, f"{name.rpartition('.')[2]} = {bad}"), [words]


MUTATIONS: list[Callable[[random.Random, str, Any], Mutation]] = [
    wrong_type, misspelt, unknown, too_small, bad_float, bad_choice, indivisible, odd_batch, broken, base,
    contradiction,
]


def test_two_hundred_mutated_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(20240501)
    runs = {name: load(name).config for name in WORLDS}
    for name, config in runs.items():  # replicas written out, so that they can be mutated
        runs[name] = with_values(config, {"layout.data_parallel_size": topology_sizes(config, WORLDS[name])[2]})
    path = tmp_path / "run.toml"
    for i in range(200):
        name = rng.choice(list(runs))
        world = ["--world-size", str(WORLDS[name])]
        clean = to_toml(runs[name])
        if i < len(runs):
            path.write_text(to_toml(list(runs.values())[i]))
            assert main(["config", "check", str(path), "--world-size", str(list(WORLDS.values())[i])]) == 0
            capsys.readouterr()
        mutation = MUTATIONS[i % len(MUTATIONS)]
        text, words = mutation(rng, clean, runs[name])
        path.write_text(text)
        code = main(["config", "check", str(path), *world])
        out, err = capsys.readouterr()
        where = f"{i} {mutation.__name__} of {name}: {err}"
        assert code == EXIT_CONFIG, where
        assert err.startswith("error: ") and "Traceback" not in err and not out, where
        for word in words:
            assert word in err, (word, where)


@pytest.mark.parametrize("bad", ["model.num_layers=x", "nothing=1", "model", "batch.global_batch_size=5", "seed=1.5"])
def test_faulty_overrides(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "runs/quickstart", "--set", bad]) == EXIT_CONFIG
    assert capsys.readouterr().err.startswith("error: ")


def test_show_round_trips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ([], ["--origin"], ["--help-fields"]):
        assert main(["config", "show", "runs/frontier-1t", "--set", "seed=7", *flags]) == 0
        out = capsys.readouterr().out
        path = tmp_path / "shown.toml"
        path.write_text(out)
        assert load(path).config == load("runs/frontier-1t", ["seed=7"]).config
        if "--origin" in flags:
            assert next(line for line in out.splitlines() if line.startswith("seed")).endswith("# --set")
            assert "models/gpt-1t.toml:" in out and "# default" in out
        if "--help-fields" in flags:
            assert "# Transformer layers." in out
    assert main(["config", "show"]) == 0
    assert capsys.readouterr().out == to_toml(RunConfig())


def test_check_says_what_it_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "runs/frontier-1t", "--world-size", "3072"]) == 0
    out = capsys.readouterr().out
    assert "tp 8 x pp 64 x dp 6 = 3072 ranks" in out and "1,008,014,617,600 parameters" in out
    assert "micro-batch 1 x 1600 accumulated x dp 6" in out


def test_fields_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "fields"]) == 0
    out = capsys.readouterr().out
    assert all(f"| `{name.rpartition('.')[2]}` |" in out for name in LEAVES)
    assert all(line.replace("\\|", "").count("|") == 5 for line in out.splitlines() if line.startswith("|"))


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ([], 2, "commands:"),
        (["--help"], 0, "commands:"),
        (["--version"], 0, "megatron-port 0"),
        (["confgi"], 2, "unknown command 'confgi'; commands: "),
        (["--nonsense"], 2, "--nonsense"),
        (["config"], 2, "usage: megatron-port config"),
        (["config", "check"], 2, "required: RUN"),
        (["config", "check", "runs/quickstart", "--world-size", "many"], 2, "invalid int value: 'many'"),
        (["config", "check", "runs/quickstart", "--world-size", "0"], 2, "the world has 0 ranks"),
        (["config", "show", "nowhere"], 2, "'nowhere' was not found"),
    ],
)
def test_exit_codes(argv: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert words in out + err and "Traceback" not in err


def test_every_command_has_its_module() -> None:
    folder = Path(cli.__file__).parent
    assert "config" in cli.COMMANDS
    assert not [name for name in cli.COMMANDS if not (folder / f"{name}.py").is_file()]


def failing(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: object) -> int:
        raise error

    monkeypatch.setattr("megatron_port.cli.config.print_fields", run)


def test_errors_become_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failing(DataError("no corpus"), monkeypatch)
    assert main(["config", "fields"]) == DataError.exit_code == 4
    assert capsys.readouterr().err == "error: no corpus\n"
    for argv in (["--debug", "config", "fields"], ["config", "fields", "--debug"]):
        assert main(argv) == 4
        assert "Traceback" in capsys.readouterr().err
    failing(KeyboardInterrupt(), monkeypatch)
    assert main(["config", "fields"]) == 130


@pytest.mark.parametrize("error", [
    ZeroDivisionError("a bug"), RecursionError(), OSError(28, "No space left on device"), UnicodeEncodeError(
        "ascii", "é", 0, 1, "ordinal not in range(128)"), MemoryError(), KeyError("a\nb é\ud800"), AssertionError(),
], ids=lambda e: type(e).__name__)
def test_what_nobody_foresaw_is_one_line_and_a_file(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "s3cretvalue")
    error.args = (*error.args, "s3cretvalue")
    failing(error, monkeypatch)
    assert main(["config", "fields"]) == 1
    err = capsys.readouterr().err
    name = type(error).__name__
    place = re.fullmatch(rf"error: {name}\b.* its traceback is in (\S+), and --debug prints it\)\n", err)
    assert place, err
    text = Path(place[1]).read_text()
    assert text.startswith("Traceback") and "s3cretvalue" not in text + err
    assert Path(place[1]).stat().st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [Path(place[1])]
    assert main(["config", "fields", "--debug"]) == 1
    assert capsys.readouterr().err.startswith("Traceback")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none" / "there"))
    (tmp_path / "none").write_text("")
    assert main(["config", "fields"]) == 1 and "could not be written" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "code"), [
    (["--local_rank=1"], 0), (["--local-rank=0"], 0), (["--local_rank", "3"], 0), (["--local_rank=x"], 2),
    (["--local_rank"], 2), (["--local_ranks=1"], 2),
])
def test_a_launchers_local_rank_ahead_of_the_command(words: list[str], code: int) -> None:
    """deepspeed --module and torch.distributed.launch put it there."""
    assert main([*words, "config", "fields"]) == code


def test_one_rank_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, words in (("0", "error: "), ("3", "")):
        monkeypatch.setenv("RANK", rank)
        assert main(["config", "check", "nowhere"]) == 2
        assert main(["config", "check", "--nonsense"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(words) and bool(err) == bool(words)


def test_speaker() -> None:
    assert is_rank_zero({}) and is_rank_zero({"RANK": "0"}) and not is_rank_zero({"RANK": "1"})
    assert is_rank_zero({"SLURM_PROCID": "5"}) and is_rank_zero({"SLURM_PROCID": "5", "SLURM_STEP_ID": "batch"})
    assert not is_rank_zero({"SLURM_PROCID": "5", "SLURM_STEP_ID": "0"})
    assert is_rank_zero({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"})
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "SLURM_PROCID": "5", "SLURM_STEP_ID": "0"}
    assert is_rank_zero(torchrun) and not is_rank_zero({**torchrun, "RANK": "1"})
    assert is_rank_zero({"RANK": "3", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}), "a RANK left over in the shell"
    assert is_rank_zero({"RANK": "x"})
    mpirun = {"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"}
    assert is_rank_zero({**mpirun, "OMPI_COMM_WORLD_RANK": "0"})
    assert not is_rank_zero({**mpirun, "OMPI_COMM_WORLD_RANK": "1"})


def test_the_reference_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/config.md is what ``config fields`` prints, under its heading."""
    assert main(["config", "fields"]) == 0
    page = (Path(__file__).resolve().parents[2] / "docs" / "config.md").read_text()
    assert page.endswith(capsys.readouterr().out), "run: python scripts/docs_reference.py"
