"""The live page: what it shows follows the files, and who may ask for it."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_report import Checked, make

from megatron_port.cli.main import main
from megatron_port.core.dist.process import PHASES
from megatron_port.core.errors import EnvironmentFault
from megatron_port.ext.telemetry.metrics import MetricsWriter
from megatron_port.run.watch.report import MOST_RANKS, NOW, NowFile, snapshot
from megatron_port.run.watch.rules import Beat, Rank, RankIdentity
from megatron_port.tools.live.server import (
    HEADERS,
    FollowedRun,
    LiveServer,
    MetricsFollower,
    document,
    ranks_part,
    read_now,
    sections,
)
from megatron_port.tools.report.run_data import read_run


def ranks(world: int, *, silent: int = -1) -> dict[int, Rank]:
    """Ranks as the hub knows them at second 100."""
    totals = tuple(float(i + 1) for i in range(len(PHASES)))
    beat = Beat(9, "step", "backward", "micro-batch", 3, 0.1, 12, 10, 30.0, totals)
    return {
        r: Rank(RankIdentity(r, f"host{r // 8}", 1, 1, f"pp 0, dp {r}, tp 0", 0), 90.0 if r == silent else 99.5,
                99.0 - r / 1000, beat)
        for r in range(world)
    }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    folder = make(tmp_path / "runs" / "mine", name="mine")
    (folder / NOW).write_text(json.dumps(snapshot(ranks(4, silent=2), 4, 100.0)))
    with LiveServer(folder) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(server: LiveServer, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Status, headers and body of an answer."""
    link = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    link.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    answer = link.getresponse()
    body = answer.read().decode()
    link.close()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, body


def test_only_loopback_and_only_with_the_token(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1" and len(server.token) >= 32
    page = f"/{server.token}/"
    assert ask(server, page)[0] == 200
    for host in ("127.0.0.1:1", "localhost", "LOCALHOST:8080", "[::1]:8080"):  # through a tunnel the port is another
        assert ask(server, page, Host=host)[0] == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "10.0.0.1"):
        status, _, body = ask(server, page, Host=host)
        assert status == 403 and "mine" not in body, host
    for path in ("/", "/data", "/live.js", f"/{server.token[:-1]}/", f"/{server.token}x/data", "/../../etc/passwd"):
        status, _, body = ask(server, path)
        assert status == 404 and "loss" not in body, path
    for path in ("config.toml", "../config.toml", "%2e%2e/config.toml", "data/x"):
        assert ask(server, page + path)[0] == 404
    assert ask(server, page, method="POST")[0] == 501
    for path in (page, f"{page}live.js", f"{page}data", "/"):
        headers = ask(server, path)[1]
        assert all(headers[name.lower()] == value for name, value in HEADERS.items())
        assert "access-control-allow-origin" not in headers
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe-eval" not in policy
    assert re.search(r"script-src[^;]*unsafe", policy) is None


def test_the_page_is_whole_without_its_script_and_loads_only_that(server: LiveServer) -> None:
    text = ask(server, f"/{server.token}/")[2]
    checked = Checked(text)
    assert [v for k, v in checked.loads if k == "src"] == ["live.js"]
    assert all(v in ("data:,", "live.js") for _, v in checked.loads)
    assert "<polyline" in text and "own seconds per step" in text
    assert "4 of 4 ranks are connected" in text and "(silent)" in text and "micro-batch 3" in text


def test_data_is_sent_when_it_has_changed(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"/{server.token}/data"
    monkeypatch.setattr("megatron_port.tools.live.server.FRESH_S", 0.0)
    monkeypatch.setattr(time, "time", lambda: 2e9)  # ages stand still
    status, headers, body = ask(server, path)
    parts = json.loads(body)
    assert status == 200 and set(parts) >= {"head", "charts", "ranks", "events"}
    assert ask(server, path, If_None_Match=headers["etag"])[0] == 304
    writer = MetricsWriter(Path(server._run.folder) / "metrics.jsonl", resumed_step=10**6)
    writer.write({"step": 10**6 + 1, "loss": 0.25, "seconds": 1.0, "time": 2e9})
    status, _, body = ask(server, path, If_None_Match=headers["etag"])
    assert status == 200 and "0.2500" in json.loads(body)["tiles"]


def test_what_is_followed_is_what_a_report_reads(tmp_path: Path) -> None:
    folder = make(tmp_path / "mine", name="mine")
    whole = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(b"")
    run = FollowedRun(folder)
    for end in range(0, len(whole) + 1, 97):  # lines arrive in pieces
        with open(folder / "metrics.jsonl", "r+b") as stream:
            stream.write(whole[:end])
        run.poll()
    (folder / "metrics.jsonl").write_bytes(whole)
    run.poll()
    wanted = read_run(folder)
    assert run.data.facts == wanted.facts and run.data.validation == wanted.validation
    assert run.data.series["loss"].buckets == wanted.series["loss"].buckets


def test_a_run_that_resumes_begins_the_curves_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    assert follower.poll() == (False, [], 0)
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    anew, records, wrong = follower.poll()
    assert anew and [r["step"] for r in records] == [1] and wrong == 0
    with open(path, "a") as stream:
        stream.write('ss": 2.0}\nnot a line\n')
    anew, records, wrong = follower.poll()
    assert not anew and [r["loss"] for r in records] == [2.0] and wrong == 1
    other = tmp_path / "new"
    other.write_text("".join(f'{{"step": {step}, "loss": 3.0}}\n' for step in range(1, 9)))  # longer than before
    other.replace(path)
    anew, records, _ = follower.poll()
    assert anew and [r["step"] for r in records] == [1, 2, 3, 4, 5, 6, 7, 8]
    path.unlink()
    assert follower.poll()[0]


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('name = "<b>x</b>"\n[training]\nsteps = 3\n')
    run = FollowedRun(tmp_path)
    run.poll()
    assert "No step has been recorded yet" in sections(run)["charts"]
    Checked(document(run))


def test_hostile_files_stay_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    folder = make(tmp_path / "mine", name="mine")
    now = snapshot(ranks(2), 2, 100.0)
    now["ranks"][0]["host"] = now["ranks"][0]["doing"] = evil
    now["doing"] = {evil: 2}
    now["ranks"].append({"rank": "1", "host": evil})
    now["ranks"].append(evil)
    now["phase_seconds"] = {evil: 1.0, "forward": float("nan")}
    (folder / NOW).write_text(json.dumps(now))
    (folder / "events.jsonl").write_text(json.dumps({"event": evil, "message": evil, "time": 1.0, "step": 1}) + "\n")
    (folder / "environment.json").write_text(json.dumps({"host": evil, "layout": evil, "versions": 7}))
    run = FollowedRun(folder)
    run.poll()
    text = document(run)
    assert "<script>alert" not in text
    Checked(text)
    for wrong in ("[]", "{", '{"time": "x"}', '{"time": 1, "world": -1, "connected": 1}'):
        (folder / NOW).write_text(wrong)
        assert read_now(folder / NOW) == {} and ranks_part({}) == ""


def test_the_hub_writes_what_ranks_do(tmp_path: Path) -> None:
    writer = NowFile(tmp_path)
    writer.write({}, 4, 0.0)
    assert not (tmp_path / NOW).exists()
    writer.write(ranks(4), 4, 100.0)
    first = read_now(tmp_path / NOW)
    assert first["connected"] == 4 and first["doing"] == {"step: backward": 4} and first["step"] == 12
    assert first["phase_seconds"] == {name: (i + 1) / 10 for i, name in enumerate(PHASES)}
    assert [r["rank"] for r in first["ranks"]] == [0, 1, 2, 3] and first["ranks"][0]["idle_seconds"] == 1.0
    writer.write(ranks(2), 4, 101.0)  # too early
    assert read_now(tmp_path / NOW)["connected"] == 4
    many = snapshot(ranks(3072), 3072, 100.0)
    assert many["connected"] == 3072 and len(many["ranks"]) == MOST_RANKS
    assert many["ranks"][-1]["rank"] == 3071  # the ones that have not moved for the longest
    assert len(json.dumps(many)) < 60_000
    assert "mean" in ranks_part(read_now_of(many, tmp_path))


def read_now_of(value: dict[str, Any], folder: Path) -> dict[str, Any]:
    (folder / NOW).write_text(json.dumps(value))
    return read_now(folder / NOW)


def test_a_port_that_is_taken_is_an_error(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    port = server.server_address[1]
    with pytest.raises(EnvironmentFault, match=f"port {port} of 127.0.0.1 cannot be had"):
        LiveServer(Path(server._run.folder), port=port)
    assert main(["watch", str(server._run.folder), "--port", str(port)]) == 3
    assert main(["watch", str(server._run.folder), "--port", "70000"]) == 2
    assert "choose another with --port" in capsys.readouterr().err
