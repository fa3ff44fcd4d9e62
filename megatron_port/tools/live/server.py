"""The server of the live page: loopback only, one token, four addresses, no file of the disk by name.

A login node's loopback interface is everybody's who is logged in there, so the address holds a random token. A page of
another site that a browser has open could reach it by a name that resolves to 127.0.0.1 (DNS rebinding): requests
whose ``Host`` is not a loopback name are refused. The page may load nothing but its own script and data.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
import time
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatron_port.core.errors import EnvironmentFault
from megatron_port.tools.live.follow import FollowedRun
from megatron_port.tools.live.sections import document, sections

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
