"""The scripts in launch/: generated, current, clean, and found from wherever they are submitted."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_port.cli.main import main
from megatron_port.core.config.loader import load
from megatron_port.tools.launch import submit as shipped
from megatron_port.tools.launch.submit import RUNS, launch_folder, shipped_scripts

ROOT = Path(__file__).resolve().parents[2]
FILES = shipped_scripts()
SCRIPTS = sorted(name for name in FILES if "/" not in name)
STUB = 'launch_main() { printf "%s|" "$launch_dir" "$site_name" "$job_run" "$@"; }\n'


def test_the_folder() -> None:
    assert launch_folder() == (ROOT / "launch").resolve()
    assert {"slurm.sh", "frontier_1t.sh", "sites/frontier.sh", "sites/perlmutter-80gb.sh"} <= set(FILES)


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_committed_file_is_what_the_renderer_gives(name: str) -> None:
    path = ROOT / "launch" / name
    assert path.read_text() == FILES[name], "run: megatron-port launch sites"
    assert os.access(path, os.X_OK) == ("/" not in name)
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_sites_tells_and_mends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "launch"
    shutil.copytree(ROOT / "launch", folder)
    monkeypatch.setattr(shipped, "launch_folder", lambda: folder)
    assert main(["launch", "sites", "--check"]) == 0 and main(["launch", "sites"]) == 0
    (folder / "slurm.sh").write_text("old")
    (folder / "sites" / "gone.sh").write_text("")
    (folder / "sites" / "cpu.sh").unlink()
    assert main(["launch", "sites", "--check"]) == 2
    err = capsys.readouterr().err
    assert "sites/cpu.sh, slurm.sh, sites/gone.sh; run megatron-port launch sites" in err
    assert main(["launch", "sites"]) == 0
    assert capsys.readouterr().out.split() == ["sites/cpu.sh", "slurm.sh", "sites/gone.sh"]
    assert main(["launch", "sites", "--check"]) == 0 and not (folder / "sites" / "gone.sh").exists()


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck() -> None:
    done = subprocess.run(
        ["shellcheck", *(str(ROOT / "launch" / name) for name in FILES)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_script_names_its_run_and_site(name: str) -> None:
    config = load(f"runs/{RUNS[name]}").config
    text = FILES[f"{name}.sh"]
    assert f"job_run=runs/{RUNS[name]}\n" in text and f'"$launch_dir/sites/{config.cluster.name}.sh"' in text
    assert f"#SBATCH --nodes={config.cluster.nodes}\n" in text and f"sites/{config.cluster.name}.sh" in FILES
    assert "job_python=''" in text and "#SBATCH --account" not in text


def test_the_generic_script_asks_for_nothing_a_site_may_lack() -> None:
    lines = [line for line in FILES["slurm.sh"].splitlines() if line.startswith("#SBATCH")]
    assert {line.split("=")[0].split()[1] for line in lines} == {
        "--job-name", "--signal", "--open-mode", "--requeue", "--output",
    }


def test_all_look_for_the_folder_in_one_way() -> None:
    ways = {FILES[name].partition("# sbatch runs a copy")[2].partition("# shellcheck source")[0] for name in SCRIPTS}
    assert len(ways) == 1 and "MEGATRON_PORT_LAUNCH" in ways.pop()


def start(script: Path, here: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{here.parent / 'bin'}:{os.defpath}"
    return subprocess.run(
        ["bash", str(script), "a b"], cwd=here, capture_output=True, text=True, check=False, env={"PATH": path, **env}
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_where_the_common_part_is_found(tmp_path: Path, name: str) -> None:
    """Told by a variable, where sbatch was called, beside the script that SLURM names, beside itself."""
    spool, here, tools = tmp_path / "spool", tmp_path / "here", tmp_path / "bin"
    for folder in (spool, here, tools):
        folder.mkdir()
    copy = spool / "slurm_script"
    copy.write_text(FILES[name])
    # The first .sh followed by a space ends the path in Command=; spaces before it belong to the path.
    names = ("told", "submit one/launch", "submit two", "by slurm")
    places = [*(tmp_path / n for n in names), spool]
    for place in places:
        (place / "sites").mkdir(parents=True)
        (place / "common.sh").write_text(STUB)
        for site in shipped.site_names():
            (place / "sites" / f"{site}.sh").write_text(FILES[f"sites/{site}.sh"])
    tool = tools / "scontrol"
    tool.write_text(f"#!/bin/sh\necho '   WorkDir=/x'\necho '   Command={places[3]}/{name} run.toml --set a.sh b'\n")
    tool.chmod(0o755)
    submit = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(here)}
    tries = [
        (places[0], {"SLURM_SUBMIT_DIR": str(places[2]), "MEGATRON_PORT_LAUNCH": str(places[0])}),
        (places[1], {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path / "submit one")}),
        (places[2], {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(places[2])}),
        (places[3], submit),
        (places[4], {}),
    ]
    for place, env in tries:
        done = start(copy, here, **env)
        assert done.returncode == 0 and not done.stderr, done.stderr
        found, site, run, argument, _ = done.stdout.split("|")
        assert (found, argument) == (str(place), "a b")
        if name == "slurm.sh":
            assert (site, run) == ("slurm", "")
        else:
            assert site in name and run == f"runs/{RUNS[name[:-3]]}"
    for place in places[3:]:
        shutil.rmtree(place)
    spool.mkdir()
    copy.write_text(FILES[name])
    for env in (submit, {**submit, "MEGATRON_PORT_LAUNCH": str(tmp_path / "nowhere")}):
        done = start(copy, here, **env)
        assert done.returncode == 3 and not done.stdout
        assert done.stderr.startswith("error: ") and "set MEGATRON_PORT_LAUNCH" in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_package_has_the_scripts() -> None:
    """megatron_port/_launch is a link that a wheel follows; the globs of pyproject.toml take every file."""
    assert (ROOT / "megatron_port" / "_launch").is_symlink()
    text = (ROOT / "pyproject.toml").read_text()
    assert '"_launch/*.sh"' in text and '"_launch/sites/*.sh"' in text
    assert {p.suffix for p in (ROOT / "launch").rglob("*") if p.is_file()} == {".sh"}


SLINGSHOT = [n for n in shipped.site_names() if load(f"clusters/{n}").config.cluster.interface.startswith("hsn")]


@pytest.mark.parametrize("name", SLINGSHOT)
def test_a_slingshot_site_names_a_cache_monitor_that_does_not_hang(name: str) -> None:
    """libfabric's default hangs at a second group, memhooks deadlocks with the plug-in (docs/hangs.md, section 3)."""
    found = dict(entry.split("=", 1) for entry in load(f"clusters/{name}").config.cluster.environment)
    assert found.get("FI_MR_CACHE_MONITOR") in ("userfaultfd", "kdreg2")
    if name == "lumi":
        assert "NCCL_NET_GDR_LEVEL" not in found


def test_the_slingshot_sites_are_known() -> None:
    assert {"frontier", "lumi", "perlmutter", "setonix", "adastra"} <= set(SLINGSHOT)


OLCF = {
    "NCCL_CROSS_NIC": "1", "NCCL_NET_GDR_LEVEL": "PHB", "NCCL_SOCKET_IFNAME": "hsn0,hsn1,hsn2,hsn3",
    "HSA_FORCE_FINE_GRAIN_PCIE": "1", "FI_MR_CACHE_MONITOR": "kdreg2", "FI_CXI_DISABLE_HOST_REGISTER": "1",
    "FI_CXI_DEFAULT_CQ_SIZE": "131072", "FI_CXI_RDZV_PROTO": "alt_read", "FI_CXI_RDZV_EAGER_SIZE": "0",
    "FI_CXI_RDZV_THRESHOLD": "0", "FI_CXI_RDZV_GET_MIN": "0", "FI_CXI_DEFAULT_TX_SIZE": "2048",
    "FI_CXI_RX_MATCH_MODE": "hybrid",
}
"""What OLCF's page "PyTorch on Frontier" asks for, its plug-in's own NCCL_NET and NCCL_NET_PLUGIN left out."""
COMMUNICATES = ("NCCL_", "RCCL_", "FI_", "CXI_", "HSA_", "UCX_")


def environment_of(name: str) -> dict[str, str]:
    """The environment of a shipped cluster's jobs."""
    return dict(entry.split("=", 1) for entry in load(f"clusters/{name}").config.cluster.environment)


def test_frontier_has_what_its_site_asks_for() -> None:
    found = environment_of("frontier")
    assert {name: found.get(name) for name in OLCF} == OLCF
    assert "--network=disable_rdzv_get" in load("clusters/frontier").config.cluster.sbatch_options  # with alt_read


@pytest.mark.parametrize("name", SLINGSHOT)
def test_a_slingshot_site_uses_all_of_its_adapters(name: str) -> None:
    found, config = environment_of(name), load(f"clusters/{name}").config
    assert found["NCCL_SOCKET_IFNAME"].count("hsn") == config.hardware.nics == 4
    assert found.get("FI_CXI_RDZV_PROTO") in (None, "alt_read")
    if "FI_CXI_RDZV_PROTO" in found:  # the one does not work without the other
        assert "--network=disable_rdzv_get" in config.cluster.sbatch_options


@pytest.mark.parametrize("name", shipped.site_names())
def test_each_variable_of_the_network_says_where_it_is_from(name: str) -> None:
    """On its line, or in the comment above it; and a cluster without such a source sets none."""
    lines = (ROOT / "configs" / "clusters" / f"{name}.toml").read_text().splitlines()
    above, begins = False, next((i for i, line in enumerate(lines) if line.startswith("environment = [")), len(lines))
    of_all = begins < len(lines) and lines[begins - 1].startswith("#") and "these" in "".join(lines[begins - 4:begins])
    for line in lines[begins + 1:]:
        if line.startswith("]"):
            break
        entry, _, comment = line.strip().partition("#")
        if entry.strip(' ",').startswith(COMMUNICATES):
            assert comment or above or of_all, f"{name}: {line}"
        above = not entry
    if name not in SLINGSHOT:
        assert not [entry for entry in environment_of(name) if entry.startswith(COMMUNICATES)]
