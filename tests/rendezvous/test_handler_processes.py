"""Handlers as the machine sees them: processes that end, commands, threads and open files."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from redelastic.redis.server import RedisServer
from tests.support.long_tests import quick_first
from tests.support.nodes import NodeFactory
from tests.support.rounds import join_all, until


class TestProcesses:
    SCRIPT = textwrap.dedent(
        """
        import gc, multiprocessing, os, sys, time
        from redelastic import handler_from_url

        def work():
            print(handler_from_url(sys.argv[1]).next_rendezvous().rank, flush=True)  # nobody holds the handler
            gc.collect()
            os.read(0, 1)

        if sys.argv[2] == "multiprocessing":
            child = multiprocessing.get_context("fork").Process(target=work)
            child.start()
            os.close(1)
            child.join()
        elif sys.argv[2] == "fork" and (child := os.fork()):
            os.close(1)
            sys.exit(os.waitpid(child, 0)[1])
        else:
            work()
        """
    )

    def start(self, url: str, run_id: str, how: str = "", **parameters: Any) -> subprocess.Popen[str]:
        query = "&".join(f"{k}={v}" for k, v in parameters.items())
        url = f"{url}?run_id={run_id}&min_nodes=1&max_nodes=2&last_call_timeout=90&{query}"
        return subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT, url, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @pytest.mark.parametrize(
        "how", quick_first(["SIGKILL", "fork", "multiprocessing", "exit", "SIGTERM", "SIGSTOP"], 2)
    )
    def test_a_process_that_goes_is_missed(
        self, how: str, server: RedisServer, run_id: str, new_node: NodeFactory
    ) -> None:
        process = self.start(server.url, run_id, how, keep_alive_interval=0.3 if how.startswith("SIG") else 30)
        try:
            node = new_node(1, 2, last_call_timeout=90)  # a process that imports torch may take long
            assert node.next_rendezvous().world_size == 2
            assert process.stdout is not None
            process.stdout.readline()
            if how.startswith("SIG"):
                process.send_signal(getattr(signal, how))
            else:
                process.communicate("", timeout=60)
            until(node.num_nodes_waiting, f"the other knows of the {how}")
            assert node.next_rendezvous().world_size == 1
        finally:
            process.kill()
            process.communicate()

    def test_a_quiet_job_costs_less_than_two_commands_a_second_and_node(
        self, own_server: RedisServer, new_node: NodeFactory, pool: ThreadPoolExecutor
    ) -> None:
        nodes = [new_node(4, 4, url=own_server.url, keep_alive_interval=0.2) for _ in range(4)]
        join_all(pool, *nodes)
        with own_server.get_client() as client:

            def calls(command: str) -> int:
                return int(client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])

            client.config_resetstat()
            until(lambda: calls("evalsha") >= 40, "10 heartbeats of each node")
            assert calls("xread") <= calls("evalsha") + 8  # one read for each beat: two commands in two seconds
        assert [n.num_nodes_waiting() for n in nodes] == [0] * 4

    @pytest.mark.parametrize("seconds", quick_first([0, 0.001, 0.01]))
    def test_a_process_may_end_while_its_bootstrap_store_starts(self, seconds: float) -> None:
        script = (
            "import time; from redelastic.rendezvous.bootstrap import BootstrapPort\n"
            f"port = BootstrapPort(); port.serve(5); time.sleep({seconds})"
        )
        ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr

    def test_threads_and_connections_end_with_their_handlers(
        self, own_server: RedisServer, new_node: NodeFactory
    ) -> None:
        process = psutil.Process()
        threads, files = threading.active_count(), process.num_fds()
        for _ in range(20):
            node = new_node(1, 1, url=own_server.url, run_id=f"leak-{time.monotonic_ns()}")
            node.next_rendezvous()
            assert node.shutdown()
            del node
        until(lambda: threading.active_count() <= threads, "the threads end")
        until(lambda: process.num_fds() <= files + 2, "the files are closed")
