"""The live page in a real browser: wide and narrow, light and dark; it follows the run, and asks no other server."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_port.ext.telemetry.metrics import MetricsWriter
from megatron_port.run.watch.report import NOW, snapshot
from megatron_port.tools.live.server import LiveServer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from browser import SCHEMES, Browser, chromium
from test_live import ranks
from test_report import make
from test_report_browser import brightness

pytestmark = [pytest.mark.slow, pytest.mark.skipif(chromium() is None, reason="no Chromium on the PATH")]


def test_the_live_page_in_chromium(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs" / "mine", name="mine")
    (folder / NOW).write_text(json.dumps(snapshot(ranks(4, silent=2), 4, 100.0)))
    program = chromium()
    assert program is not None
    with LiveServer(folder) as server, Browser(program) as browser:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        for scheme in SCHEMES:
            for width in (1280, 390):
                seen = browser.look(server.url, scheme, width=width, seconds=1.0)
                assert {url.removeprefix(server.url) for url in seen.requests} <= {"", "live.js", "data", "data:,"}
                assert seen.console == [] and seen.width <= width and seen.height > 1000
                assert (brightness(seen.background) > 0.8) is (scheme == "light")
                assert text_of(browser, "link") == "live"
        writer = MetricsWriter(folder / "metrics.jsonl", resumed_step=10**6)
        writer.write({"step": 10**6 + 1, "loss": 0.125, "time": time.time()})
        until = time.monotonic() + 20
        while "0.1250" not in text_of(browser, "tiles"):
            assert time.monotonic() < until, "the page did not follow the run"
            time.sleep(0.3)
        server.shutdown()
        server.server_close()
        while text_of(browser, "link") == "live":
            assert time.monotonic() < until + 20, "the page did not notice that its server has ended"
            time.sleep(0.3)


def text_of(browser: Browser, part: str) -> str:
    """The text of an element of the page."""
    found = browser.call("Runtime.evaluate", expression=f"document.getElementById({part!r}).textContent")
    return str(found["result"]["value"])
