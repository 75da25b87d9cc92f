"""A run as one HTML file: the dashboard's own modules and style sheet, and what they show, with nothing to load."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from redelastic.monitoring.wording import clean

from .view import saved

if TYPE_CHECKING:
    from redelastic.monitoring.history import History

PAGE: Final = Path(__file__).parent / "page"
MODULES: Final = ("dom.js", "events.js", "timeline.js", "saved.js")  # each after all that it imports

_LINKS: Final = re.compile(r"^import .*\n|^export ", re.MULTILINE)  # between modules: here they are one
_DOCUMENT: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src {script_hash}; \
style-src {style_hash}; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="main"><noscript>This page needs JavaScript.</noscript></main>
<script type="application/json" id="run">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def page(run_id: str, history: History) -> str:
    """The file's text. Data from Redis is in it only as JSON, in which no markup is left."""
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    script = "".join(_LINKS.sub("", (PAGE / name).read_text(encoding="utf-8")) for name in MODULES)
    return _DOCUMENT.format(
        title=html.escape(f"{clean(run_id)} · redelastic"),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=json.dumps(saved(run_id, history), allow_nan=False).replace("<", "\\u003c"),  # ASCII, without </script>
    )


def _hash(text: str) -> str:
    """The one inline script or style sheet that a Content-Security-Policy allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
