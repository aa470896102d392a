"""A whole gateway on a free port, with its clients."""

import asyncio
import functools
import hmac
import json
import re
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway import components
from gateway.app import REGISTRY, make_app
from gateway.billing import ledger
from gateway.fleet.engines.health import Health
from gateway.records.bases import registry
from gateway.records.requests import refused
from gateway.records.sql.database import migrate
from gateway.serve import listening
from gateway.settings import Settings
from testing.gateway.upstream import TOKEN

ADMIN_KEY = "tests-admin-5f0c9a1e7b3d4826"
PEPPER = "tests-pepper-c41d07e96ab2f358"
BASE_MODEL = "base"
CONTEXT = 256
# A token per byte, so that a test can count: the template adds 2 per message and 1 at the end.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m['content'] }}>{% endfor %}:"
)
MODEL_CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
}
HI = [{"role": "user", "content": "Hi"}]
# "<Hi>:" in bytes.
HI_TOKENS = 5


def save_model(folder: Path, context: int = CONTEXT) -> Path:
    """Save a model folder as the gateway reads it: a byte tokenizer, a chat template and a config, but no weights.

    context: the model's context length in tokens.
    """
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG | {"max_position_embeddings": context}))
    return folder


class Answer:
    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Return the error object, after a check of its shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """Return a stream's events, decoded; "[DONE]" stays a string."""
        lines = [line[6:] for line in self.body.decode().split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class Client:
    """A client with a key, or without one."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str | None) -> None:
        self.session, self.url, self.key = session, url, key

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    async def call(self, method: str, path: str, **options: Any) -> Answer:
        headers = self.headers | options.pop("headers", {})
        async with self.session.request(method, self.url + path, headers=headers, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.call("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        return await self.call("POST", path, json=body, **options)

    async def chat(self, **body: Any) -> Answer:
        return await self.post("/v1/chat/completions", {"model": BASE_MODEL, "messages": HI} | body)

    async def complete(self, **body: Any) -> Answer:
        return await self.post("/v1/completions", {"model": BASE_MODEL, "prompt": "Hi"} | body)

    async def usage(self) -> list[dict[str, Any]]:
        return (await self.get("/v1/usage")).json["data"]


class Browser(Client):
    """A browser at `/admin` or `/console`, which keeps its cookies. It follows redirects only to answers of forms.

    home: the path.
    """

    def __init__(self, url: str, home: str) -> None:
        # `unsafe` only means that cookies from an IP address are accepted.
        session = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))
        super().__init__(session, url, None)
        self.home = home

    async def __aenter__(self) -> "Browser":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def call(self, method: str, path: str, **options: Any) -> Answer:
        answer = await super().call(method, path, **{"allow_redirects": False} | options)
        where = answer.headers.get("Location", "")
        # The answer to a form has a URL of its own.
        is_answer = where.startswith((f"{self.home}/answers/", f"{self.home}/login?refused="))
        return await self.get(where) if is_answer else answer

    async def submit(self, path: str, **fields: str) -> Answer:
        """Send a form with the session's CSRF value."""
        return await self.call("POST", path, data={"csrf": await self.csrf()} | fields)

    async def log_in(self, key: str | None, then: str = "") -> Answer:
        form = await self.get(f"{self.home}/login")
        [csrf] = re.findall(r'name="csrf" value="(\w+)"', form.body.decode())
        fields = {"csrf": csrf, "key": key or "", "next": then}
        return await self.call("POST", f"{self.home}/login", data=fields)

    def cookie(self, name: str = "loraplex_session") -> str | None:
        """Return the value of a cookie of the browser's own path."""
        return next((c.value for c in self.session.cookie_jar if c.key == name and c["path"] == self.home), None)

    async def csrf(self) -> str:
        """Return the CSRF value of the session, which is derived from its token."""
        token = self.cookie() or ""
        return hmac.digest(PEPPER.encode(), f"csrf.{token}".encode(), "sha256").hex()


class Gateway:
    """A running gateway. connections: cut off before it stops, because it would wait for clients that do not read."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session
        self.connections: list[asyncio.WriteTransport] = []
        self.admin = Client(session, url, ADMIN_KEY)
        self.nobody = Client(session, url, None)

    def client(self, key: str) -> Client:
        return Client(self.session, self.url, key)

    @asynccontextmanager
    async def browser(self, key: str | None = ADMIN_KEY, home: str = "/admin") -> AsyncIterator[Browser]:
        """Return a browser that is logged in with the key; None: not logged in."""
        async with Browser(self.url, home) as browser:
            if key is not None:
                assert (await browser.log_in(key)).status == 303
            yield browser

    async def engines_up(self, number: int, seconds: float = 30.0) -> None:
        """Wait until exactly this many engines are up, as `/readyz` counts them."""

        async def are_up() -> bool:
            return (await self.nobody.get("/readyz")).json["engines_up"] == number

        await until(are_up, seconds)

    async def engine_faults(self) -> list[str]:
        """Return the address and the fault of each engine that gets no requests, as an operator reads them."""
        engines = (await self.admin.get("/admin/api/engines")).json["data"]
        return [f"{engine['url']} is {engine['reason']}" for engine in engines if engine["reason"] is not None]

    async def tenant(self, name: str, **limits: Any) -> Client:
        """Create a tenant and return its client, with a key of all scopes."""
        assert (await self.admin.post("/admin/api/tenants", {"name": name} | limits)).status == 201
        made = await self.admin.post(f"/admin/api/tenants/{name}/keys")
        assert made.status == 201
        return self.client(made.json["key"])


@functools.cache
def empty_database() -> bytes:
    """Return a SQLite file with the newest schema. The migrations, 0.15 s of CPU, run once per process."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        # In a thread of its own, because `migrate` starts an event loop and the caller may have one.
        thread.submit(migrate, f"sqlite:///{folder}/gateway.db").result()
        return (Path(folder) / "gateway.db").read_bytes()


def settings(folder: Path, model_dir: Path, engines: list[str], redis_url: str, **overrides: Any) -> Settings:
    """Return settings for a test gateway: a port that it chooses itself, and short time-outs.

    Its database is made here, with the newest schema, unless `folder` has one or the overrides name one.
    """
    database = folder / "gateway.db"
    if "database_url" not in overrides and folder.is_dir() and not database.exists():
        database.write_bytes(empty_database())
    values: dict[str, Any] = {
        "database_url": f"sqlite:///{folder}/gateway.db",
        "redis_url": redis_url,
        "engines": engines,
        "internal_token": TOKEN,
        "adapter_store": str(folder / "adapters"),
        "journal_dir": folder / "journal",
        "model_dir": model_dir,
        "base_model": BASE_MODEL,
        "key_pepper": PEPPER,
        "admin_key": ADMIN_KEY,
        "port": 0,
        "migrate_on_start": True,
        # Much longer than a slow machine needs, so that no test is refused for lag.
        "redis_timeout": 10.0,
        "shutdown_seconds": 1.0,
        "default_max_tokens": 64,
        # No test counts as a flood.
        "unserved_per_second": 1e6,
    }
    return Settings.load({}, **values | overrides)


@asynccontextmanager
async def running(of: Settings) -> AsyncIterator[Gateway]:
    """Serve a gateway and yield it once each engine has answered a health check, well or not.

    On a busy machine the first check may have no answer in time, and the engine would miss the test's first requests.
    """
    app = await make_app(of)
    async with listening(app, of) as url, aiohttp.ClientSession() as session:
        await becomes(lambda: all(each.condition.health is not Health.UNKNOWN for each in app[REGISTRY].engines))
        gateway = Gateway(url, session)
        try:
            yield gateway
        finally:
            for connection in gateway.connections:
                connection.abort()


@asynccontextmanager
async def running_alone(of: Settings) -> AsyncIterator[Gateway]:
    """Serve a gateway that waits neither for other gateways' caches nor for more rows of a batch.

    Otherwise a change of a name takes 0.5 s and one of a base 0.7 s, and usage is visible after 0.2 s, a refusal after
    2 s. Gateways on one database need these waits.
    """
    waits = (
        (components, "TRUST_SECONDS", 0.0),
        (registry, "KNOWN_SECONDS", 0.0),
        (ledger, "LINGER_SECONDS", 0.02),
        (refused, "FLUSH_SECONDS", 0.1),
    )
    with ExitStack() as patches:
        for module, name, seconds in waits:
            patches.enter_context(patch.object(module, name, seconds))
        async with running(of) as gateway:
            yield gateway


async def until(condition: Callable[[], Awaitable[Any]], seconds: float = 30.0) -> None:
    """Wait for a condition that becomes true after the response."""
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        await asyncio.sleep(0.02)


def becomes(condition: Callable[[], bool]) -> Awaitable[None]:
    """Wait for a condition as `until`."""

    async def is_true() -> bool:
        return condition()

    return until(is_true)


async def change_database(folder: Path, statement: str, *values: Any) -> None:
    """Change the SQLite database of a gateway that runs in this process.

    It happens on a thread, because a transaction of the gateway may hold the lock and must be able to end.
    """

    def change() -> None:
        with closing(sqlite3.connect(folder / "gateway.db")) as database, database:
            database.execute(statement, values)

    await asyncio.to_thread(change)
