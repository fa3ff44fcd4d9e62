"""launch/site_report.sh as a job of two nodes: every node is checked, names stay here, an end comes with an archive."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import ROOT, environment

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


UNJUDGED = """\
extends = ["clusters/cpu"]
[preflight]
share_of_median = 0.0
"""
"""Both nodes are this machine, and whatever else runs on it slows one of them. What is tested here is the archive; the
verdicts are tested in test_sick_nodes.py."""


def contents(archive: Path) -> dict[str, str]:
    """File → text."""
    found = {}
    with tarfile.open(archive) as tar:
        for entry in tar.getmembers():
            stream = tar.extractfile(entry)
            if stream is not None:
                found[entry.name.removeprefix("site-report/")] = stream.read().decode()
    return found


def states(summary: str) -> dict[str, str]:
    """Part → state."""
    return {part["name"]: part["state"] for part in json.loads(summary)["parts"]}


def test_a_job_of_two_nodes_leaves_an_archive_without_their_names(cluster: Cluster) -> None:
    out, description = cluster.shared / "report", cluster.shared / "unjudged.toml"
    description.write_text(UNJUDGED)
    parts = ["doctor", "preflight-node", "preflight-network", "preflight-report", "preflight-nodes"]
    job = cluster.sbatch(
        "-N2", "--ntasks-per-node=1", "--gpus-per-node=8", "-t5", "-o", cluster.shared / "job.out",
        ROOT / "launch" / "site_report.sh", "--short", "--out", out, "--cluster", description, "--only", *parts,
        cwd=ROOT, env=environment(),
    )
    record = cluster.wait(job)
    log = (cluster.shared / "job.out").read_text()
    found = contents(out.with_suffix(".tar.gz"))
    assert states(found["summary.json"]) == dict.fromkeys(parts, "ok"), log + "".join(found.values())
    assert record["JobState"] == "COMPLETED" and "at most " in log
    assert {"preflight/node-HOST.json", "preflight/node-HOST-2.json", "preflight-nodes/network.json"} <= set(found)
    between = json.loads(found["preflight-nodes/network.json"])
    assert between["nodes"] == ["HOST", "HOST-2"] and between["ranks"] == 4
    text = "".join(found.values())
    assert "login1" not in text and not any(f'"{name}"' in text for name in cluster.nodes)
    assert not any(address in text for address in cluster.addresses.values())


def test_a_job_that_is_told_to_end_packs_what_it_has(cluster: Cluster) -> None:
    out = cluster.shared / "ended"
    job = cluster.sbatch(
        "-N1", "-t5", "-o", cluster.shared / "ended.out", ROOT / "launch" / "site_report.sh", "--out", out, "--only",
        "doctor", "kernels", "layouts", cwd=ROOT, env=environment(),
    )
    cluster.wait_for(lambda: (out / "kernels.txt").exists(), 60, "the second part")
    cluster.run(["scancel", "--batch", "--signal=TERM", str(job)])
    cluster.wait(job)
    found = contents(out.with_suffix(".tar.gz"))
    assert states(found["summary.json"]) == {
        "doctor": "ok", "kernels": "stopped: the job was told to end", "layouts": "not run: no time left"}
