"""A node without an agent, which a test freezes: it runs each verb that it reads in a thread, and prints the reply.

Usage: frozen_node.py URL. The verbs send what the node knew in its first round, whatever has happened since.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from redelastic import handler_from_url
from redelastic.redis import scripts
from redelastic.rendezvous.handler import RedisRendezvousHandler
from redelastic.store import RedisStore


class Node:
    """A node in its first round, and requests as it would send them then."""

    def __init__(self, url: str) -> None:
        handler = handler_from_url(url)
        assert isinstance(handler, RedisRendezvousHandler)
        store = handler.next_rendezvous().store
        assert isinstance(store, RedisStore)
        self.handler, self.store, node = handler, store, handler.node
        self._id, self._run, self._known = node.id, [*node.keys], node.known(node.view)
        self._store_keys = [store._keys.data]

    def ask(self, script: scripts.Script, *args: Any) -> Any:
        return script(self.handler.backend.connection, self._run, [self._id, *args], 5.0)

    def leave(self) -> Any:
        return scripts.LEAVE(self.handler.backend.connection, self._run, [*self._known, "stops", "reason", "late"], 5.0)

    def join(self, after: int) -> Any:
        args: list[Any] = [*self._known, after, "127.0.0.1 1", ""]
        return scripts.JOIN(self.handler.backend.connection, [*self._run, *self._store_keys], args, 5.0)

    def beat(self) -> Any:
        return scripts.BEAT(self.handler.backend.connection, [*self._run, *self._store_keys], self._known, 5.0)


WRITES: Final[dict[str, Callable[[Node], Any]]] = {
    "set": lambda node: node.store.set("k", "late"),
    "multi_set": lambda node: node.store.multi_set(["k", "new"], ["late", "late"]),
    "add": lambda node: node.store.add("n", 1),
    "append": lambda node: node.store.append("k", "late"),
    "compare_set": lambda node: node.store.compare_set("k", "v", "late"),
    "delete_key": lambda node: node.store.delete_key("k"),
    "queue_push": lambda node: node.store.queue_push("q", "late"),
    "queue_pop": lambda node: node.store.queue_pop("q", block=False),
}
REQUESTS: Final[dict[str, Callable[[Node], Any]]] = {
    "beat": Node.beat,
    "drain": lambda node: node.ask(scripts.DRAIN, "late", 1000),
    "leave": Node.leave,
    "charge": lambda node: node.ask(scripts.CHARGE, "host", 1, 0, 7, 1, 0, 0, 0, 1, "message", "late"),
}
JOINS: Final[dict[str, Callable[[Node], Any]]] = {
    "first join": lambda node: node.join(0),
    "join": lambda node: node.join(1),
}


def main(url: str) -> None:
    node = Node(url)

    def run(verb: str) -> None:
        try:
            reply = (WRITES | REQUESTS | JOINS)[verb](node)
            result = repr(reply)
        except Exception as e:  # noqa: BLE001
            result = type(e).__name__
        sys.stdout.write(json.dumps([verb, result]) + "\n")
        sys.stdout.flush()

    sys.stdout.write("joined\n")
    sys.stdout.flush()
    for line in sys.stdin:
        threading.Thread(target=run, args=(line.strip(),), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
