"""Delivers a node's last words to Redis, with only the standard library: the warden's last act.

``redelastic/redis/last_words.py`` writes them.
"""

from __future__ import annotations

import base64
import json
import socket
import ssl
import time
from typing import Any, Final

TIMEOUT: Final = 1.5  # of each wait for the network, in seconds
ATTEMPTS: Final = 2
PAUSE: Final = 0.2  # between them, in seconds


def deliver(words: bytes) -> bool:
    """Send the requests in ``words``; returns whether Redis answered none of them with an error.

    It tries twice: a request sent twice takes effect once (I8).
    """
    told = json.loads(words)
    requests = base64.b64decode(told["requests"])
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE if attempt else 0)
        try:
            with _connect(told["address"], told["tls"]) as server:
                server.sendall(requests)
                with server.makefile("rb") as replies:  # each is a single line
                    lines = [replies.readline() for _ in range(told["replies"])]
        except OSError:
            continue
        if all(line.endswith(b"\n") for line in lines):
            return not any(line.startswith(b"-") for line in lines)
    return False


def _connect(address: Any, tls: dict[str, Any] | None) -> socket.socket:
    if isinstance(address, str):
        server = socket.socket(socket.AF_UNIX)
        server.settimeout(TIMEOUT)
        server.connect(address)
        return server
    server = socket.create_connection(tuple(address), TIMEOUT)
    if tls is None:
        return server
    context = ssl.create_default_context()
    context.check_hostname = tls["check_hostname"]
    context.verify_mode = ssl.VerifyMode[tls["verify_mode"]]
    if tls["certificate"]:
        context.load_cert_chain(tls["certificate"], tls["key"], tls["key_password"])
    if tls["ca"]:
        context.load_verify_locations(tls["ca"])
    return context.wrap_socket(server, server_hostname=address[0])
