"""The server of the live page: loopback only, one token, four addresses, no file of the disk by name.

A login node's loopback interface is everybody's who is logged in there, so the address holds a random token. A page of
another site that a browser has open could reach it by a name that resolves to 127.0.0.1 (DNS rebinding): requests
whose ``Host`` is not a loopback name are refused. The page may load nothing but its own script and data.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import secrets
import threading
import time
from hashlib import blake2b
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatron_port.core.dist.process import PHASES
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.io.files import open_regular, read_regular
from megatron_port.core.io.typed_json import WrongContent, parse_json
from megatron_port.ext.telemetry.console import duration
from megatron_port.ext.telemetry.expert_file import FILE_NAME as EXPERTS
from megatron_port.ext.telemetry.metrics import FILE_NAME, LINE_CHARACTERS, decode, known_metrics
from megatron_port.ext.telemetry.numbers import number
from megatron_port.ext.telemetry.step_metrics import Metric
from megatron_port.run.run_files import EVENTS, FINISHED, RANKS
from megatron_port.run.run_state import FAILED, RUNNING, RunState, run_state
from megatron_port.run.watch.report import NOW
from megatron_port.tools.charts.page import (
    LAYOUT,
    PICTURE,
    Bar,
    Cell,
    card,
    colour,
    columns,
    drawing,
    gantt,
    legend,
    table,
    themes,
)
from megatron_port.tools.report.run_data import MetricsSums, RunData, read_around
from megatron_port.tools.report.run_report import charts, event_table, expert_part, rank_spread, read_history, tiles

# The part of the live page about ranks: what each is doing, and where the time of a step goes.

LEFT, WIDTH, EACH = 64.0, 720.0, 20.0
STALE_S = 30.0
"""Heartbeats that are older are said to be old."""
_WORDS = ("host", "coords", "scope", "doing")
_NUMBERS = ("rank", "step", "idle_seconds", "seconds_per_step")
_BYTES = 1 << 20


def read_now(path: Path) -> dict[str, Any]:
    """Return now.json; empty where there is none, or something that no run writes."""
    try:
        value = parse_json(read_regular(path, _BYTES))
    except (OSError, WrongContent):
        return {}
    if not isinstance(value, dict) or not all(_count(value.get(name)) for name in ("time", "world", "connected")):
        return {}
    ranks = value.get("ranks")
    value["ranks"] = [r for r in ranks if _is_rank(r)] if isinstance(ranks, list) else []
    doing = value.get("doing")
    value["doing"] = {str(k): v for k, v in doing.items() if _count(v)} if isinstance(doing, dict) else {}
    value["phase_seconds"] = _phases(value.get("phase_seconds"))
    return value


def _count(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value < 1e15


def _is_rank(value: Any) -> bool:
    if not isinstance(value, dict) or not all(_count(value.get(name)) for name in _NUMBERS):
        return False
    value["phase_seconds"] = _phases(value.get("phase_seconds"))
    return all(isinstance(value.get(name), str) for name in _WORDS)


def _phases(value: Any) -> dict[str, float]:
    """Return seconds by phase, of those that a run has."""
    given = value if isinstance(value, dict) else {}
    return {name: float(given[name]) for name in PHASES if _count(given.get(name))}


def ranks_part(now: dict[str, Any]) -> str:
    """Return what the ranks do, as HTML; empty: nothing is known."""
    if not now:
        return ""
    age = time.time() - float(now["time"])
    old = f" As of {age:,.0f} s ago." if age > STALE_S else ""
    doing = ", ".join(f"{int(count)} in {what}" for what, count in now["doing"].items())
    note = f"{int(now['connected'])} of {int(now['world'])} ranks are connected: {doing or 'nothing known'}.{old}"
    parts = [card("What the ranks are doing", _table(now["ranks"]), note)]
    drawn = _picture(now)
    if drawn:
        parts.insert(0, card("Seconds per step, by phase", drawn, "Mean of the steps of this start. Transfer and "
                             "reduce are waits for other ranks."))
    return columns(parts)


def _table(ranks: list[dict[str, Any]]) -> str:
    head: list[Cell] = [("rank", "n"), "host", "place", ("step", "n"), "doing", ("no progress for (s)", "n")]
    rows: list[list[Cell]] = [
        [(str(int(r["rank"])), "n"), (r["host"], "wide"), r["coords"], (f"{int(r['step']):,}", "n"),
         (f"{r['scope']}: {r['doing']}" + (" (silent)" if r.get("silent") else ""), "wide"),
         (f"{r['idle_seconds']:.1f}", "n")]
        for r in ranks
    ]
    return table(head, rows, bad=[bool(r.get("silent")) for r in ranks]) if rows else ""


def _picture(now: dict[str, Any]) -> str:
    """Draw a bar for each rank, divided by phase; of many ranks the mean alone."""
    rows = [(f"rank {int(r['rank'])}", r["phase_seconds"]) for r in now["ranks"] if any(r["phase_seconds"].values())]
    if len(rows) > 32 or not rows:
        rows = [("mean", now["phase_seconds"])] if any(now["phase_seconds"].values()) else []
    if not rows:
        return ""
    longest = max(sum(phases.values()) for _, phases in rows)
    bars = []
    for name, phases in rows:
        at, row = 0.0, []
        for i, phase in enumerate(PHASES):
            seconds = phases.get(phase, 0.0)
            if seconds > 0:
                row.append(Bar(at, at + seconds, colour(i), title=f"{name}: {phase} {number(seconds)} s"))
                at += seconds
        bars.append(row)
    drawn = gantt(bars, left=LEFT, top=6, scale=(WIDTH - LEFT - 8) / longest, each=EACH, span=longest,
                  names=[name for name, _ in rows])
    foot = 6 + EACH * len(rows)
    swatches, more = legend(LEFT, foot + 18, [(phase, colour(i)) for i, phase in enumerate(PHASES)], WIDTH - LEFT)
    return drawing(WIDTH, foot + 12 + more, [*drawn, swatches], "seconds per step by phase and rank")


# A run that is read while it is written: metrics.jsonl line by line, the other files when they have changed.

_AROUND = ("config.toml", "environment.json", "outcome.json", "run.json", EVENTS, RANKS)
EXPERTS_EVERY_S = 10.0
"""experts.jsonl is read as a whole, so not more often."""


class MetricsFollower:
    """Reader of the lines that metrics.jsonl has grown by.

    A run that resumes rewrites the file without the steps that it takes again: then all of it is read anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        """Device and inode of what was read."""
        self.known: dict[str, Metric] = {}
        """Metrics that its lines may have."""
        self._offset, self._rest = 0, b""

    def poll(self) -> tuple[bool, list[dict[str, Any]], int]:
        """Return (whether the file is another one than before, its new records, lines that are none)."""
        try:
            with open(open_regular(self._path, follow=True), "rb") as stream:
                status = os.fstat(stream.fileno())
                identity = status.st_dev, status.st_ino
                anew = identity != self._file or status.st_size < self._offset
                if anew:
                    self.known = known_metrics(self._path.parent)
                    self._file, self._offset, self._rest = identity, 0, b""
                stream.seek(self._offset)
                data = stream.read()
        except OSError:
            anew, self._file, self._offset, self._rest = self._file is not None, None, 0, b""
            return anew, [], 0
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:LINE_CHARACTERS]
        records = [decode(line.decode("utf-8", "replace"), self.known) for line in lines if line.strip()]
        return anew, [r for r in records if r is not None], sum(r is None for r in records)


class FollowedRun:
    """A run's folder as it is now. Not thread-safe: one reader at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = RunData(folder, folder.resolve().name)
        self.state: RunState = run_state(folder)
        self.now: dict[str, Any] = {}
        self.experts = ""
        """HTML of the experts' load; empty: none."""
        self._metrics = MetricsFollower(folder / FILE_NAME)
        self._sums = MetricsSums(self.data)
        self._seen: tuple[Any, ...] = ()
        self._experts_at = -EXPERTS_EVERY_S
        self._experts_seen: Any = None

    def poll(self) -> None:
        """Read what has changed since the last call."""
        anew, records, _ = self._metrics.poll()
        if anew:
            self.data.metrics = self._metrics.known
            self._sums = MetricsSums(self.data)
        for record in records:
            self._sums.add(record)
        seen = tuple(_mark(self.folder / name) for name in _AROUND)
        if seen != self._seen:
            self._seen = seen
            read_around(self.data)
        self._sums.finish()
        self.state = run_state(self.folder)
        self.now = read_now(self.folder / NOW)
        self._poll_experts()

    def _poll_experts(self) -> None:
        mark, now = _mark(self.folder / EXPERTS), time.monotonic()
        if mark == self._experts_seen or now - self._experts_at < EXPERTS_EVERY_S:
            return
        self._experts_seen, self._experts_at = mark, now
        self.experts = expert_part(self.data, read_history(self.data))


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file does; None: there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


# The parts of the live page, each as HTML that the page's script puts in the place of the one before.

SECTIONS = ("head", "tiles", "charts", "experts", "ranks", "spread", "events")
_STYLE = """
.bar{height:6px;border-radius:3px;background:var(--idle);margin:10px 0 4px;overflow:hidden}
.bar i{display:block;height:100%;background:var(--c0)}
.state{font-weight:600}.state.running{color:var(--good)}.state.failed{color:var(--bad)}
#link{position:fixed;right:12px;bottom:12px;background:var(--card);border:1px solid var(--rule);border-radius:8px;
padding:4px 10px;font-size:13px;color:var(--soft)}#link.bad{color:var(--bad);border-color:var(--bad)}
main>div:empty{display:none}#ranks td{white-space:nowrap}#spread{margin-top:16px}
""".strip()


def sections(run: FollowedRun) -> dict[str, str]:
    """Return the HTML of every section by its name; empty where there is nothing to show."""
    data = run.data
    stepped = bool(data.series["loss"].buckets or data.validation)
    return {
        "head": _head(run),
        "tiles": tiles(data) if data.facts else "",
        "charts": f"<h2>Training</h2>{charts([data])}" if stepped else
                  '<p class="soft">No step has been recorded yet.</p>',
        "experts": f"<h2>Experts</h2>{run.experts}" if run.experts else "",
        "ranks": f"<h2>Ranks</h2>{ranks_part(run.now)}" if run.now else "",
        "spread": columns([rank_spread(data)]) if data.spread else "",
        "events": f"<h2>Events</h2>{event_table([data])}",
    }


def _head(run: FollowedRun) -> str:
    state = run.state
    words = [f'<span class="state {state.status}">{escape(state.status)}</span>']
    if state.why:
        words.append(escape(state.why))
    share = 0.0
    if state.steps:
        share = min(state.step / state.steps, 1.0)
        words.append(f"step {state.step:,} of {state.steps:,}")
    left = _left(run)
    if left is not None and state.status == RUNNING:
        words.append(f"{duration(left)} to go")
    env = run.data.environment
    words += [escape(str(env[name])) for name in ("layout", "device", "host") if name in env]
    if state.time and state.status not in (FINISHED, FAILED):
        words.append(f"last line {max(time.time() - state.time, 0):,.0f} s ago")
    bar = f'<div class="bar"><i style="width:{100 * share:.2f}%"></i></div>' if state.steps else ""
    return f'<h1>{escape(run.data.name)}</h1>{bar}<p class="soft">{" · ".join(words)}</p>'


def _left(run: FollowedRun) -> float | None:
    """Return the seconds until the last step, by the mean of the latest ones."""
    buckets = run.data.series["seconds"].buckets[-20:]
    count = sum(b.count for b in buckets)
    if not count or not run.state.steps:
        return None
    return (run.state.steps - run.state.step) * sum(b.total for b in buckets) / count


def document(run: FollowedRun) -> str:
    """Return the whole page, which is readable without its script too."""
    parts = sections(run)
    body = "\n".join(f'<div id="{name}">{parts[name]}</div>' for name in SECTIONS)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(run.data.name)}</title>\n'
        f"<style>{themes()}\n{LAYOUT}\n{PICTURE}\n{_STYLE}</style>\n"
        '<script src="live.js" defer></script></head>\n'
        f'<body><main>\n{body}\n</main><div id="link" role="status">not live: scripts are off</div></body></html>\n'
    )


ADDRESS = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names under which the page is asked for; through a tunnel with any port."""
FRESH_S = 1.0
"""What was read is given to all who ask within this time."""
TIMEOUT_S = 20.0
POLICY = ("default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; img-src data:; "
          "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY", "Cache-Control": "no-store",
}
_SCRIPT = Path(__file__).with_name("page.js")


class LiveServer(ThreadingHTTPServer):
    """Server of one run's page, on ``ADDRESS``.

    Args:
        port: 0: one that is free.

    Raises:
        EnvironmentFault: the port is taken.
    """

    daemon_threads = True

    def __init__(self, folder: Path, *, port: int = 0) -> None:
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise EnvironmentFault(
                f"port {port} of {ADDRESS} cannot be had ({getattr(error, 'strerror', None) or error}); choose another "
                "with --port, or leave it out"
            ) from error
        self.token = secrets.token_urlsafe(24)
        self.script = _SCRIPT.read_bytes()
        self.closing = False
        self._run = FollowedRun(folder)
        self._lock = threading.Lock()
        self._read_at = float("-inf")

    @property
    def url(self) -> str:
        """Return the page's address on this machine."""
        return f"http://{ADDRESS}:{self.server_address[1]}/{self.token}/"

    def page(self) -> bytes:
        """Return the page with what is known now."""
        with self._lock:
            self._refresh()
            return document(self._run).encode()

    def data(self) -> bytes:
        """Return the sections as JSON."""
        with self._lock:
            self._refresh()
            return json.dumps(sections(self._run)).encode()

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._read_at >= FRESH_S:
            self._run.poll()
            self._read_at = time.monotonic()

    def server_close(self) -> None:
        """Take no more connections, and answer no more on those that are kept open."""
        self.closing = True
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over a client that left."""


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: LiveServer
    timeout = TIMEOUT_S
    server_version, sys_version = "megatron-port", ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with the page, its script, its data, or 404."""
        if self.server.closing:
            self.close_connection = True
            return
        host = (self.headers.get("Host") or "").strip().lower()
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if name not in HOSTS:
            self._send(403, b"this page is for this machine alone\n", "text/plain; charset=utf-8")
            return
        token, _, rest = self.path.removeprefix("/").partition("?")[0].partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._send(404, b"no such page; the whole address was printed where `watch` was started\n",
                       "text/plain; charset=utf-8")
        elif rest == "":
            self._send(200, self.server.page(), "text/html; charset=utf-8")
        elif rest == "live.js":
            self._send(200, self.server.script, "text/javascript; charset=utf-8")
        elif rest == "data":
            body = self.server.data()
            tag = f'"{blake2b(body, digest_size=12).hexdigest()}"'
            if self.headers.get("If-None-Match") == tag:
                self._send(304, b"", "application/json", {"ETag": tag})
            else:
                self._send(200, body, "application/json", {"ETag": tag})
        else:
            self._send(404, b"no such page\n", "text/plain; charset=utf-8")

    def _send(self, code: int, body: bytes, kind: str, more: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {**HEADERS, **(more or {}), "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses hold the token."""
