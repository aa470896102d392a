"""Change counters by tenant: no change is missed, and none empties another tenant's cache."""

import asyncio
import random
from typing import Any

import asyncpg
import pytest
from sqlalchemy import event, text

from gateway.access.auth import Authenticator
from gateway.errors import Forbidden, InvalidKey, Unavailable
from gateway.records.adapters.catalog import Catalog
from gateway.records.caches.cached_query import CachedQuery
from gateway.records.caches.changes import OPERATORS, PRICES, Changes, count_change
from gateway.records.keys.keys import ApiKey, Keys
from gateway.records.money.prices import Price, PriceList, Prices
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenant, Tenants
from testing.gateway.bases import only
from testing.gateway.running import ADMIN_KEY, PEPPER, until


@pytest.fixture
async def postgres_database(migrated_postgres_url: str) -> Any:
    database = Database(migrated_postgres_url)
    yield database
    await database.close()


async def change(database: Database, *scopes: str | None) -> None:
    async with database.write() as connection:
        await count_change(connection, *scopes)


class CountingKeys(Keys):
    """Keys that count lookups. found: number of lookups."""

    found = 0

    async def find(self, key_id: str) -> ApiKey | None:
        self.found += 1
        return await super().find(key_id)


async def test_one_tenants_changes_leave_anothers_answers(database: Database):
    here = Changes(database, 3600.0)
    await here.read()
    mark = here.mark
    for _ in range(3):
        await change(database, "acme")
        await here.read()
        assert not here.holds(mark, "acme")
        assert here.holds(mark, "globex")
        assert here.holds(mark, PRICES)
        mark = here.mark
        await here.read()
        assert here.holds(mark, "acme")
    await change(database, None, PRICES)
    await here.read()
    assert [here.holds(mark, scope) for scope in (OPERATORS, PRICES, "acme")] == [False, False, True]


async def test_changes_since_a_mark(database: Database):
    await change(database, "before")
    here = Changes(database)
    assert here.since(here.mark - 1) is None
    await here.read()
    # The first reading returns no tenants, because nothing is cached yet.
    first = here.mark
    assert here.since(first - 1) is None
    assert here.since(first) == set()
    for scope in ("acme", "globex", "acme"):
        await change(database, scope)
        await here.read()
    assert here.since(first) == {"acme", "globex"}
    assert here.since(here.mark - 1) == {"acme"}
    assert here.since(here.mark) == set()


async def test_a_query_over_all_tenants_is_repeated_after_a_change(database: Database, monkeypatch: pytest.MonkeyPatch):
    here, asked = Changes(database), []

    async def ask() -> list[int]:
        asked.append(0)
        # A change during the query may be missing in its answer.
        if len(asked) == 2:
            await change(database, "acme")
            await here.read()
        return list(asked)

    cached = CachedQuery(here, ask)
    await here.read()
    numbers = []
    for _ in range(2):
        numbers.append(len(await cached.get()))
        await here.read()
    assert numbers == [1, 1]
    await change(database, "globex")
    await here.read()
    assert [len(await cached.get()) for _ in range(3)] == [2, 3, 3]
    monkeypatch.setattr("gateway.records.caches.cached_query.RELOAD_SECONDS", 0.0)
    assert len(await cached.get()) == 4


async def add_key(keys: Keys, auth: Authenticator, tenant: Tenant) -> tuple[ApiKey, str]:
    key, clear = auth.issue(tenant, frozenset({"usage"}), "")
    await keys.add(key, "op")
    return key, f"Bearer {clear}"


async def test_a_tenant_that_pushes_all_the_time_costs_others_no_lookup(database: Database):
    keys, tenants = CountingKeys(database), Tenants(database)
    changes = Changes(database)
    auth = Authenticator(keys, PEPPER, ADMIN_KEY, changes)
    catalog = Catalog(database, only(), changes)
    noisy, quiet = await tenants.create("noisy", {}, "op"), await tenants.create("quiet", {}, "op")
    _, bearer = await add_key(keys, auth, quiet)
    await catalog.add_version(quiet, "mine", digest="a" * 64, rank=8, num_bytes=1, actor="a")
    await auth.tenant(bearer, "usage")
    mine = await catalog.resolve(quiet, "mine")
    before = keys.found
    for i in range(10):
        await catalog.add_version(noisy, f"n{i}", digest="b" * 64, rank=8, num_bytes=1, actor="a")
        await auth.refresh()
        await auth.tenant(bearer, "usage")
        assert await catalog.resolve(quiet, "mine") is mine
    assert keys.found == before


async def test_a_process_that_stalled_asks_once_and_not_for_each_key(database: Database):
    keys, tenants = CountingKeys(database), Tenants(database)
    changes = Changes(database)
    auth = Authenticator(keys, PEPPER, ADMIN_KEY, changes)
    acme = await tenants.create("acme", {}, "op")
    made = [await add_key(keys, auth, acme) for _ in range(20)]
    await auth.refresh()
    for _, bearer in made:
        await auth.tenant(bearer, "usage")
    assert keys.found == 20
    readings = 0

    def count(*_: Any) -> None:
        nonlocal readings
        readings += 1

    event.listen(database._reserved.sync_engine, "begin", count)
    # No reading for longer than any cached answer is trusted.
    await asyncio.sleep(0.6)
    await asyncio.gather(*(auth.tenant(bearer, "usage") for _, bearer in made))
    assert (keys.found, readings) == (20, 1)
    # The first request after such a pause sees a revocation made in it.
    await asyncio.sleep(0.6)
    await keys.revoke(made[0][0].id, "op")
    with pytest.raises(InvalidKey):
        await auth.tenant(made[0][1], "usage")


async def test_a_commit_that_comes_after_a_newer_one_is_noticed(postgres_database: Database):
    """A transaction with an older stamp commits last, after a reading that has seen the newer one."""
    database, here = postgres_database, Changes(postgres_database)
    await here.read()
    mark = here.mark
    async with database.write() as slow:
        await count_change(slow, "slow")
        for _ in range(3):
            # It does not delay another tenant's change either.
            async with asyncio.timeout(30):
                await change(database, "quick")
            await here.read()
            assert not here.is_unchanged(mark, "quick")
            assert here.is_unchanged(mark, "slow")
            mark = here.mark
    await here.read()
    assert not here.is_unchanged(mark, "slow")


async def test_an_older_transaction_that_waited_for_a_newer_one_is_noticed(postgres_database: Database):
    """An older transaction that waited for a newer one lowers the row's stamp."""
    database, here = postgres_database, Changes(postgres_database)
    await change(database, "acme")
    await here.read()
    async with database.write() as older:
        await older.execute(text("SELECT pg_current_xact_id()"))
        for _ in range(3):
            await change(database, "acme")
        await here.read()
        mark = here.mark
        await count_change(older, "acme")
    await here.read()
    assert not here.is_unchanged(mark, "acme")


async def test_no_change_is_missed_by_readings_at_any_moment(database: Database):
    """Writers commit in any order beside two readers: the first reading after a commit includes its change."""
    readers = [Changes(database), Changes(database)]
    for reader in readers:
        await reader.read()
    rng, missed, made = random.Random(7), 0, 0
    sleeps = database.dialect == "postgresql"

    async def write(number: int) -> None:
        nonlocal missed, made
        for _ in range(12):
            scope = f"t{rng.randrange(5)}"
            marks = [reader.mark for reader in readers]
            async with database.write() as connection:
                if sleeps and rng.random() < 0.5:
                    await connection.execute(text("SELECT pg_current_xact_id()"))
                    await asyncio.sleep(rng.random() * 0.02)
                await count_change(connection, scope)
                if sleeps:
                    await asyncio.sleep(rng.random() * 0.02)
            for reader, mark in zip(readers, marks, strict=True):
                await reader.read()
                missed += reader.is_unchanged(mark, scope)
            made += 1

    await asyncio.gather(*(write(number) for number in range(6)))
    assert (made, missed) == (72, 0)


async def test_a_change_of_the_release_before_is_taken_for_a_change_of_everything(database: Database):
    here = Changes(database)
    await here.read()
    mark = here.mark
    async with database.write() as connection:
        await connection.execute(text("UPDATE access_changes SET changes = changes + 1"))
    await here.read()
    assert not here.is_unchanged(mark, "acme")


async def test_another_server_is_believed_nothing_of(database: Database):
    """After a failover stamps may restart lower, or be assigned twice, so no stamp of another server is trusted."""
    here = Changes(database)
    for known in (("another", 0), None):
        await here.read()
        mark = here.mark
        here._server = known
        await here.read()
        assert not here.is_unchanged(mark, "acme")
    mark, here._since = here.mark, here._since + 10**6
    await here.read()
    assert not here.is_unchanged(mark, "acme")


async def test_prices_are_loaded_when_they_have_changed(database: Database):
    loads = 0

    class CountingPrices(Prices):
        async def list(self) -> Any:
            nonlocal loads
            loads += 1
            return await super().list()

    stored, changes = CountingPrices(database), Changes(database)
    known = PriceList(stored, only())
    await changes.read()
    watch = asyncio.create_task(known.watch(changes))
    await until(lambda: asyncio.sleep(0, loads))
    await asyncio.sleep(0.7)
    before = loads
    assert before == 1
    acme = await Tenants(database).create("acme", {}, "op")
    await changes.read()
    await asyncio.sleep(0.5)
    assert loads == before
    catalog = Catalog(database, only(), changes)
    for name in ("pirate", "alias"):
        await catalog.add_version(acme, name, digest="a" * 64, rank=8, num_bytes=1, actor="a")
    assert (await catalog.resolve(acme, "alias")).names == ("alias",)
    await stored.put("acme/pirate", Price(output=5), "op")
    await changes.read()

    async def priced() -> bool:
        return known.price("acme", await catalog.resolve(acme, "alias")).output == 5

    await until(priced)
    assert loads == before + 1
    watch.cancel()
    await asyncio.wait({watch})


async def test_known_keys_are_believed_as_long_as_the_operator_says(database_url: str):
    """Known keys are trusted without the database for the configured time; strict: half a second.

    Otherwise known keys continue to work; unknown and revoked keys do not.
    """
    database = Database(database_url)
    await database.upgrade()
    keys, tenants = Keys(database), Tenants(database)
    strict, lenient = (Authenticator(keys, PEPPER, ADMIN_KEY, Changes(database, seconds)) for seconds in (0.5, 60.0))
    acme = await tenants.create("acme", {}, "op")
    (_, good), (revoked, bad), (_, never_seen) = [await add_key(keys, strict, acme) for _ in range(3)]
    await keys.revoke(revoked.id, "op")
    for auth in (strict, lenient):
        await auth.refresh()
        await auth.tenant(good, "usage")
        with pytest.raises(InvalidKey):
            await auth.tenant(bad, "usage")

    async def away(*_: Any, **__: Any) -> Any:
        raise Unavailable("away")

    database.reconnect = away  # type: ignore[method-assign]
    refuse = lambda *_: (_ for _ in ()).throw(OSError("away"))  # noqa: E731
    for engine in (database._engine, database._reserved):
        event.listen(engine.sync_engine, "begin", refuse)
    await asyncio.sleep(0.6)
    with pytest.raises(Unavailable):
        await strict.tenant(good, "usage")
    assert (await lenient.tenant(good, "usage")).tenant.name == "acme"
    with pytest.raises(InvalidKey):
        await lenient.tenant(bad, "usage")
    with pytest.raises(Unavailable):
        await lenient.tenant(never_seen, "usage")
    with pytest.raises(Forbidden):
        await lenient.tenant(good, "inference")
    for engine in (database._engine, database._reserved):
        event.remove(engine.sync_engine, "begin", refuse)
    await strict.tenant(good, "usage")
    await database.close()


async def test_a_server_that_became_read_only_is_connected_to_anew(migrated_postgres_url: str):
    """A server became read-only after a switchover: connections and reads succeed, every write fails."""
    database = Database(migrated_postgres_url)
    await database.close()

    async def read_only(value: str) -> None:
        name = migrated_postgres_url.split("/")[3].split("?")[0]
        operator = await asyncpg.connect(migrated_postgres_url)
        await operator.execute("SET default_transaction_read_only = off")
        await operator.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = {value}")
        await operator.close()

    await read_only("on")
    await database.ping()
    await read_only("off")
    with pytest.raises(Unavailable):
        await change(database, "acme")
    await change(database, "acme")
    await database.close()
