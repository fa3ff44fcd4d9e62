"""Job scripts: whatever a value holds, bash and sbatch get that value and nothing else happens."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.config.layout import with_values
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError
from megatron_port.tools.launch.script import (
    Order,
    emit,
    job_block,
    render,
    sbatch_lines,
    sbatch_quote,
    shell_fill,
    shell_quote,
)

STUB = r"""
port_user='so me'
load_modules() { printf '%s\0' "$@"; }
launch_main() {
  site_setup
  job_setup
  printf '%s\0' END "$site_name" "$site_interface" "$site_local_disk" "$site_cores_per_task" "$job_run" "$job_python" \
    "$job_stage" "$job_spare_nodes" "$job_preflight" "${#site_srun[@]}" "${site_srun[@]}" "${#job_overrides[@]}" \
    "${job_overrides[@]}" "$SITE_VALUE" "$JOB_VALUE" "$@"
}
"""
FRAGMENTS = [
    "$(touch x)", "`touch x`", "; touch x", "&& touch x", "| touch x", "> x", "'", '"', "\\", "\\'", "$HOME", "${x}",
    "#", " ", "  ", "*", "?", "[a]", "~", "!", "(", ")", "{", "}", "{a,b}", "{user}",
    "{job_id}", "{local_disk}", "%j", "%x", "=", ",", ":", "-", "--", "é", "漢", "\u2028", "a", "b c", "/x/y", "EOF",
    "'\\''",
]
anything = st.characters(exclude_categories=["Cc", "Cs"])
hostile = st.lists(st.one_of(st.sampled_from(FRAGMENTS), anything), max_size=8).map("".join)
impossible = st.characters(categories=["Cc", "Cs"])
filled = {"user": "so me", "job_id": "77"}


def expected(text: str, disk: str | None = None) -> str:
    known = filled if disk is None else {**filled, "local_disk": disk}
    return re.sub(r"\{(\w*)\}", lambda m: known.get(m.group(1), m.group(0)), text)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A launch folder with the stub, under a name that would do harm if it were not quoted."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "it's $(touch x)" / "la unch"
        place.mkdir(parents=True)
        (place / "common.sh").write_text(STUB)
        yield place


def values_of(script: str, *arguments: str) -> list[str]:
    """What the stub saw; fails where the script did anything else."""
    with tempfile.TemporaryDirectory() as here:
        done = run_file(script, here, arguments)
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert os.listdir(here) == ["job.sh"]
    return done.stdout.decode().split("\0")[:-1]


def run_file(script: str, here: str, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[bytes]:
    path = Path(here) / "job.sh"
    path.write_text(script, encoding="utf-8", newline="\n")
    env = {"PATH": os.defpath, "SLURM_JOB_ID": "77", "HOME": here}
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    return subprocess.run(["bash", str(path), *arguments], cwd=here, capture_output=True, env=env, check=False)


FIELDS = (
    "name", "account", "run", "python", "stage", "override", "site_value", "job_value", "module", "disk", "interface",
    "srun", "option",
)
TEXTS = st.fixed_dictionaries(dict.fromkeys(FIELDS, hostile))


def scripted(t: dict[str, str], folder: Path) -> str:
    """The script of a run that has these texts in every place that takes one."""
    config = with_values(RunConfig(), {
        "name": t["name"], "cluster.name": t["interface"], "cluster.nodes": 4, "cluster.cores_per_task": 7,
        "cluster.interface": t["interface"], "cluster.local_disk": t["disk"], "cluster.modules": (t["module"],),
        "cluster.environment": (f"SITE_VALUE={t['site_value']}",), "cluster.srun_options": (f"--x={t['srun']}",),
        "cluster.sbatch_options": (f"--comment={t['option']}",), "launch.account": t["account"],
        "launch.python": t["python"], "launch.stage": t["stage"],
        "launch.environment": (f"JOB_VALUE={t['job_value']}",), "launch.spare_nodes": 1, "launch.preflight": True,
    })
    order = Order(run=t["run"], overrides=("seed=1", f"name={t['override']}", "cluster.nodes=4"))
    return render(config, order, launch_dir=folder)


@settings(max_examples=100, deadline=None)
@given(t=TEXTS)
def test_any_text_arrives(folder: Path, t: dict[str, str]) -> None:
    script = scripted(t, folder)
    disk = expected(t["disk"])
    assert values_of(script, "x y", "--set") == [
        t["module"], "END", t["interface"], t["interface"], disk, "7", t["run"], t["python"], t["stage"], "1", "1",
        "1", f"--x={t['srun']}", "4", "--set", "seed=1", "--set", f"name={t['override']}",
        expected(t["site_value"], disk), expected(t["job_value"], disk), "x y", "--set",
    ]
    said = sbatch_arguments(script)
    assert f"--job-name={t['name']}" in said and f"--comment={t['option']}" in said and "--nodes=5" in said
    assert (f"--account={t['account']}" in said) == bool(t["account"])


@settings(max_examples=100, deadline=None)
@given(t=TEXTS, field=st.sampled_from(FIELDS), char=impossible)
def test_what_cannot_be_said_is_refused(folder: Path, t: dict[str, str], field: str, char: str) -> None:
    with pytest.raises(ConfigError, match=rf"has the character U\+{ord(char):04X} at position "):
        scripted({**t, field: t[field] + char}, folder)


def sbatch_arguments(script: str) -> list[str]:
    """The arguments in the #SBATCH lines as sbatch 22.05 reads them (checked against it below)."""
    out = []
    for line in script.split("\n"):
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            word, quote, escaped = "", "", False
            for c in line[7:] + " ":
                if escaped:
                    word, escaped = word + c, False
                elif c == "\\":
                    escaped = True
                elif c == quote:
                    quote = ""
                elif not quote and c in "'\"":
                    quote = c
                elif not quote and c in " \t#":
                    out += [word] if word else []
                    word = ""
                    if c == "#":
                        break
                else:
                    word += c
            assert not quote
    return out


def parsed_by_sbatch(script: str, folder: Path) -> str:
    """What `sbatch -vvv` says it read; it says so before it looks for a controller, and is stopped then."""
    conf = folder / "slurm.conf"
    conf.write_text(
        "ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=9\nNodeName=n\nPartitionName=p Nodes=n\n"
    )
    path = folder / "job.sh"
    path.write_text(script)
    env = {"PATH": os.environ["PATH"], "SLURM_CONF": str(conf), "LC_ALL": "C.UTF-8"}
    lines = []
    with subprocess.Popen(["sbatch", "-vvv", "--test-only", str(path)], env=env, stdin=subprocess.DEVNULL,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr
        for raw in process.stderr:
            lines.append(raw.decode())
            if "end of defined options" in lines[-1]:
                break
        process.kill()
    return "".join(lines)


@pytest.mark.skipif(not shutil.which("sbatch"), reason="sbatch is not installed")
@pytest.mark.parametrize("name", [
    "plain", "two words", "it's", 'say "hi"', "$(touch x)", "`touch x`", "back\\slash\\", "a # b", ": b", "é 漢", " - ",
    "".join(map(chr, range(32, 127))),
])
def test_sbatch_itself_reads_the_same(tmp_path: Path, name: str) -> None:
    config = with_values(RunConfig(), {
        "name": name, "cluster.nodes": 4, "launch.account": name, "cluster.partition": "p q",
        "launch.sbatch_options": (f"--comment={name}", "--exclusive"), "launch.time": "1-02:03:00",
    })
    script = render(config, Order(run="/x"), launch_dir=tmp_path)
    text = parsed_by_sbatch(script, tmp_path)
    for option, value in (("job-name", name), ("account", name), ("comment", name), ("partition", "p q"),
                          ("nodes", "4"), ("time", "1-02:03:00"), ("signal", "B:USR1@300"), ("exclusive", "exclusive")):
        assert re.search(rf"^sbatch: {option} +: {re.escape(value)}$", text, re.MULTILINE), (option, text)
    read = re.findall(r'Found in script, argument "(.*)"$', text, re.MULTILINE)
    assert read == sbatch_arguments(script)


def test_sbatch_lines_of_the_largest_run() -> None:
    lines = sbatch_lines(load("runs/frontier-1t").config)
    for line in ("--job-name=frontier-1t", "--nodes=384", "--ntasks-per-node=8", "--cpus-per-task=7", "--time=04:00:00",
                 "--partition=batch", "--signal=B:USR1@1800", "--open-mode=append", "--requeue", "--output=%x-%j.out",
                 "--network=disable_rdzv_get", "--exclusive"):
        assert f"#SBATCH {line}" in lines
    assert not [line for line in lines if "account" in line or "qos" in line]


def test_spares_options_and_policies() -> None:
    config = load("runs/frontier-22b", [
        "launch.spare_nodes=1", "launch.preflight=true", "launch.account=abc",
        'launch.sbatch_options=["--constraint=x&y"]', "launch.when_failed=stop", "cluster.qos=debug",
    ]).config
    lines = sbatch_lines(config, after="12")
    assert "#SBATCH --nodes=3" in lines and "#SBATCH --account=abc" in lines and "#SBATCH --qos=debug" in lines
    assert "#SBATCH --requeue" in lines, "a job that saved is queued again"
    assert "#SBATCH --dependency=afterany:12" in lines
    assert lines.index('#SBATCH --constraint="x&y"') > lines.index("#SBATCH --constraint=nvme"), "the later one wins"
    kept = replace(config, launch=replace(config.launch, when_lost="replace"))
    assert "#SBATCH --no-kill" in sbatch_lines(kept) and "#SBATCH --no-kill" not in lines
    assert "\njob_no_kill=1\n" in job_block(kept.launch, Order(run="run.toml"))
    with pytest.raises(ConfigError, match="the script for flux starts each rank by itself"):
        emit("flux", kept, Order(run="run.toml"), "python3", "")
    stop = replace(config, launch=replace(config.launch, when_stopped="stop"))
    assert "#SBATCH --no-requeue" in sbatch_lines(stop) and "#SBATCH --requeue" not in sbatch_lines(stop)


@pytest.mark.parametrize("char", ["\n", "\0", "\r", "\x1b", "\x7f", "\x85", "\udcff"])
def test_what_no_script_can_hold(char: str) -> None:
    for quote in (shell_quote, shell_fill, sbatch_quote):
        with pytest.raises(ConfigError, match=r"launch\.python has the character U\+[0-9A-F]{4} at position 3 "):
            quote(f"ab{char}c", "launch.python")


def test_quoting_is_readable() -> None:
    assert shell_quote("runs/frontier-1t", "x") == "runs/frontier-1t"
    assert shell_quote("", "x") == "''" and shell_fill("", "x") == "''"
    assert shell_fill("/mnt/{user}/a b/{job_id}{none}", "x") == "/mnt/\"$port_user\"'/a b/'\"$SLURM_JOB_ID\"'{none}'"
    assert sbatch_quote('a "b" \\', "x") == '"a \\"b\\" \\\\"'
