"""Fixtures of the tests of the records."""

import pytest

from gateway.records.adapters.catalog import Catalog
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenant, Tenants
from testing.gateway.bases import only


@pytest.fixture
def catalog(database: Database) -> Catalog:
    return Catalog(database, only())


@pytest.fixture
async def acme(database: Database) -> Tenant:
    return await Tenants(database).create("acme", {}, "op")


@pytest.fixture
async def connected(database: Database) -> Database:
    """Return a database whose pool is full, so that no change waits for the connection of its transaction."""
    held = [database.read() for _ in range(8)]
    for each in held:
        await each.__aenter__()
    for each in held:
        await each.__aexit__(None, None, None)
    return database
