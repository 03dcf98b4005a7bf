"""The file of the page, and the policy under which a browser runs it: its own script and style, by their digests, and
nothing else; it can talk to nobody but this router, and nothing of it becomes HTML but what is in the file."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def load_page() -> tuple[bytes, dict[str, str]]:
    """The body, and the headers that go with it."""
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    digests = {kind: _digest(content) for kind, content in _INLINE.findall(text)}
    policy = (
        "default-src 'none'",
        f"script-src 'sha256-{digests['script']}'",
        f"style-src 'sha256-{digests['style']}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    headers = {
        "content-security-policy": "; ".join(policy),
        "content-type": "text/html; charset=utf-8",
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return text.encode(), headers


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
