"""A line to a chat or a pager when a job starts, ends or is queued again: a webhook, beside SLURM's mail.

The URL is in the environment variable MEGATRON_PORT_WEBHOOK, which sbatch hands to the job. It is a secret (who has it
can post), so it is never written to a record, a log or a message.
"""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request

from megatron_port.core.io.redact import redact
from megatron_port.core.io.variables import variables

VARIABLE = "MEGATRON_PORT_WEBHOOK"
TIMEOUT_S = 5.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses to be sent elsewhere."""

    def redirect_request(self, *_: object) -> None:
        """Return nothing: the answer becomes an HTTPError."""
        return None


def notify(event: str, text: str, **more: str) -> str:
    """Post ``{"text": …, "event": …}`` and what ``more`` names; return a line for the log if that failed.

    Slack, Mattermost and Teams show ``text``. Never raises: a job does not depend on it.
    """
    url = variables((VARIABLE,)).get(VARIABLE, "")
    if not url:
        return ""
    if not url.startswith(("https://", "http://")):
        return f"{VARIABLE} is no http(s) URL: nobody was told"
    body = json.dumps({"text": redact(text), "event": event, **more}).encode()
    try:
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        with contextlib.closing(urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S)):
            return ""
    except urllib.error.HTTPError as error:
        return f"the webhook answered {error.code}: nobody was told"
    except Exception as error:  # a malformed URL raises anything, with the URL in its text
        return f"the webhook did not answer ({type(error).__name__}): nobody was told"
