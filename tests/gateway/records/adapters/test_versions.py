"""Versions and aliases of adapters on SQLite and PostgreSQL: references, compare-and-swap, canary, expiry, deletion."""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from alembic import command
from alembic.config import Config
from sqlalchemy import event, select, update
from sqlalchemy.engine import Engine

import migrations
from gateway.billing.writer import UsageWriter
from gateway.errors import (
    AdapterInUse,
    BadRequest,
    ModelNotFound,
    NoEarlierState,
    PreconditionFailed,
    PreconditionRequired,
    RecordNotFound,
)
from gateway.records.adapters import rows as adapter_rows
from gateway.records.adapters.aliases import AliasTarget
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.limits import KEPT_VERSIONS
from gateway.records.adapters.mixtures import names_in, resolve_model
from gateway.records.adapters.rows import Reason
from gateway.records.adapters.versions import KEPT_REFUSED
from gateway.records.caches.changes import Changes
from gateway.records.past_usage import PastUsage, UsagePart
from gateway.records.sql.database import Database
from gateway.records.sql.tables import adapter_versions, audit
from gateway.records.tenants.tenants import Tenant, Tenants
from testing.gateway.bases import only
from testing.gateway.clocks import clock_ahead
from testing.gateway.rows import NOON, row
from testing.gateway.versions import add, digest


async def meaning(catalog: Catalog, tenant: Tenant, text: str, user: str | None = None) -> int | None:
    """Return the number of the content that a text means; None for a 404."""
    try:
        found = (await catalog.resolve(tenant, text, user)).digest
    except ModelNotFound:
        return None
    return None if found is None else int(found, 16)


async def test_changes_of_one_tenant_at_once_never_wait_for_each_other(
    catalog: Catalog, acme: Tenant, database: Database
):
    """PostgreSQL ends transactions that wait for each other with an error."""
    tenants = Tenants(database)
    for number in range(30):
        doomed = await tenants.create(f"doomed-{number}", {}, "op")
        await add(catalog, doomed, "old", 1)
        made, refused, pushed, deleted = await asyncio.gather(
            add(catalog, acme, f"new-{number}", 1),
            catalog.versions.refuse(acme, f"new-{number}", [Reason(message="expected tensors")]),
            add(catalog, doomed, "old", 2),
            tenants.delete(doomed.name, "op", ["base"]),
            return_exceptions=True,
        )
        assert (made, refused, deleted) == (None, None, None)
        assert pushed is None or isinstance(pushed, RecordNotFound), "the push came after the deletion"


async def test_references_mean_versions_and_aliases(catalog: Catalog, acme: Tenant, database: Database):
    other = await Tenants(database).create("other", {}, "op")
    await add(catalog, acme, "pirate", 1, 2, 3)
    await catalog.aliases.move(acme, "pirate", "prod", [AliasTarget(2)], "key")
    for text, number in (("pirate", 3), ("pirate:latest", 3), ("pirate@1", 1), ("pirate:prod", 2)):
        assert await meaning(catalog, acme, text) == number
        # Twice: the second answer comes from the cache.
        model = await catalog.resolve(acme, text)
        assert (model.name, model.names, model.version, model.shown) == ("pirate", ("pirate",), number, model.shown)
        assert model.shown == ("pirate" if text == "pirate:latest" else text)
        assert await meaning(catalog, other, text) is None
    for text in (
        "pirate@4",
        "pirate@0",
        "pirate@01",
        "pirate:test",
        "pirate:3",
        "pirate@",
        "base@1",
        "x@1",
        "pirate@1:a",
    ):
        assert await meaning(catalog, acme, text) is None, text
    # In a mixture each term is a reference; its name has plain names.
    mixed = await resolve_model(catalog, acme, "pirate@1*0.7+pirate:prod*.3")
    assert (mixed.name, mixed.shown) == ("pirate*0.3+pirate*0.7", "pirate@1*0.7+pirate:prod*.3")
    assert mixed.adapters == (digest(1), digest(2))
    assert (mixed.names, mixed.version, mixed.versions) == (("pirate",), None, (("pirate", 1), ("pirate", 2)))
    # A key's permission for the plain name covers its versions and aliases.
    assert names_in("pirate:prod", only()) == names_in("pirate@7", only()) == ["pirate"]
    assert names_in("pirate@1*0.7+base*1", only()) == ["pirate", "base"]
    assert names_in("Pirate@1", only()) == ["Pirate@1"]
    # Only plain names may have limits and prices.
    assert [await catalog.knows(acme, text) for text in ("pirate", "base", "pirate@1", "pirate:prod", "x")] == [
        True,
        True,
        False,
        False,
        False,
    ]


async def test_an_alias_moves_by_compare_and_swap(catalog: Catalog, acme: Tenant, database: Database):
    elsewhere = Catalog(database, only(), Changes(database))
    await add(catalog, acme, "pirate", 1, 2, 3)
    with pytest.raises(PreconditionFailed):
        await catalog.aliases.move(acme, "pirate", "prod", [AliasTarget(1)], "key", "*")
    first, is_new = await catalog.aliases.move(acme, "pirate", "prod", [AliasTarget(1)], "key")
    assert is_new
    with pytest.raises(PreconditionRequired) as refused:
        await catalog.aliases.move(acme, "pirate", "prod", [AliasTarget(2)], "key")
    assert refused.value.headers == {"ETag": first.etag}
    moves = [
        catalog.aliases.move(acme, "pirate", "prod", [AliasTarget(number)], "key", first.etag)
        for number in (1, 2, 3, 2)
    ]
    answers = await asyncio.gather(*moves, return_exceptions=True)
    made = [answer for answer in answers if isinstance(answer, tuple)]
    lost = [answer for answer in answers if isinstance(answer, PreconditionFailed)]
    assert (len(made), len(lost)) == (1, 3)
    present = await catalog.aliases.get(acme, "pirate", "prod")
    assert {error.headers["ETag"] for error in lost} == {present.etag} == {made[0][0].etag}
    assert await meaning(elsewhere, acme, "pirate:prod") == present.targets[0].version
    for targets in (
        [],
        [AliasTarget(9)],
        [AliasTarget(1), AliasTarget(1)],
        [AliasTarget(1, 0)],
        [AliasTarget(number) for number in range(9)],
    ):
        with pytest.raises(BadRequest) as bad:
            await catalog.aliases.move(acme, "pirate", "prod", targets, "key", "*")
        assert bad.value.param == "targets"
    for name in ("3", "UP", "", "a" * 33, "a\0"):
        with pytest.raises(BadRequest):
            await catalog.aliases.move(acme, "pirate", name, [AliasTarget(1)], "key")
        with pytest.raises(RecordNotFound):
            await catalog.aliases.get(acme, "pirate", name)
    # `latest` is an alias too; an upload moves it on.
    latest = await catalog.aliases.get(acme, "pirate", "latest")
    await catalog.aliases.move(acme, "pirate", "latest", [AliasTarget(1)], "key", latest.etag)
    assert await meaning(catalog, acme, "pirate") == 1
    await add(catalog, acme, "pirate", 4)
    assert await meaning(catalog, acme, "pirate") == 4
    assert (await catalog.aliases.rollback(acme, "pirate", "latest", "key")).targets == (AliasTarget(1),)
    assert await meaning(catalog, acme, "pirate") == 1
    with pytest.raises(BadRequest):
        await catalog.aliases.delete(acme, "pirate", "latest", "key")
    with pytest.raises(PreconditionFailed):
        await catalog.aliases.delete(acme, "pirate", "prod", "key", first.etag)
    await catalog.aliases.delete(acme, "pirate", "prod", "key", present.etag)
    assert await meaning(catalog, acme, "pirate:prod") is None
    async with database.read() as connection:
        done = (await connection.execute(select(audit.c.action).where(audit.c.action.like("adapter.%")))).scalars()
    counted = {"adapter.push": 4, "adapter.alias": 3, "adapter.rollback": 1, "adapter.alias_delete": 1}
    assert Counter(done) == counted


async def test_a_rollback_skips_versions_that_are_gone(catalog: Catalog, acme: Tenant):
    await add(catalog, acme, "pirate", 1, 2, 3)
    for number in (1, 2, 3):
        await catalog.aliases.move(acme, "pirate", "prod", [AliasTarget(number)], "key", "*" if number > 1 else None)
    await catalog.delete(acme, "pirate", "key", 2)
    assert (await catalog.aliases.rollback(acme, "pirate", "prod", "key")).targets == (AliasTarget(1),)
    with pytest.raises(NoEarlierState):
        await catalog.aliases.rollback(acme, "pirate", "prod", "key")
    assert await meaning(catalog, acme, "pirate:prod") == 1


async def test_a_canary_has_its_share_and_a_user_one_version(catalog: Catalog, acme: Tenant, database: Database):
    changes = Changes(database)
    elsewhere = Catalog(database, only(), changes)
    await add(catalog, acme, "pirate", 1, 2)
    await catalog.aliases.move(acme, "pirate", "prod", [AliasTarget(1, 95), AliasTarget(2, 5)], "key")
    in_turn = Counter([await meaning(catalog, acme, "pirate:prod") for _ in range(1000)])
    assert abs(in_turn[2] - 50) <= 3
    users = [f"user-{number}" for number in range(1000)]
    before = {user: await meaning(catalog, acme, "pirate:prod", user) for user in users}
    # The tenant's id is random: 50 users on average, standard deviation 6.9. The bounds are five of them away.
    assert 15 <= Counter(before.values())[2] <= 85
    # Another gateway chooses alike, also after a move to the same weights.
    await catalog.aliases.move(acme, "pirate", "prod", [AliasTarget(2, 5), AliasTarget(1, 95)], "key", "*")
    assert {user: await meaning(elsewhere, acme, "pirate:prod", user) for user in users} == before
    # A larger canary takes users over and gives none back.
    await catalog.aliases.move(acme, "pirate", "prod", [AliasTarget(1, 50), AliasTarget(2, 50)], "key", "*")
    await changes.read()
    after = {user: await meaning(elsewhere, acme, "pirate:prod", user) for user in users}
    assert 400 <= Counter(after.values())[2] <= 600
    assert all(after[user] == 2 for user in users if before[user] == 2)
    assert await meaning(elsewhere, acme, "pirate:prod", "\ud800") in (1, 2)


async def test_expiry_is_enforced_at_use(catalog: Catalog, acme: Tenant, monkeypatch: pytest.MonkeyPatch):
    await add(catalog, acme, "pirate", 1, 2)
    soon = datetime.now(UTC) + timedelta(hours=1)
    await catalog.aliases.move(acme, "pirate", "prod", [AliasTarget(1), AliasTarget(2, 10_000, soon)], "key")
    await catalog.versions.change(acme, "pirate", 1, {"expires_at": soon + timedelta(hours=1)}, "op")
    assert await meaning(catalog, acme, "pirate:prod", "u") == 2
    monkeypatch.setattr(adapter_rows, "datetime", clock_ahead(timedelta(hours=1)))
    assert await meaning(catalog, acme, "pirate:prod", "u") == 1
    monkeypatch.setattr(adapter_rows, "datetime", clock_ahead(timedelta(hours=2)))
    assert [await meaning(catalog, acme, text) for text in ("pirate:prod", "pirate@1", "pirate@2")] == [None, None, 2]
    assert (await catalog.versions.get(acme, "pirate", 1)).state == "retired"
    for values in ({"state": "ready"}, {"expires_at": soon}):
        with pytest.raises(BadRequest) as refused:
            await catalog.versions.change(acme, "pirate", 1, values, "op")
        assert refused.value.param == "expires_at"
    await catalog.versions.change(acme, "pirate", 1, {"state": "ready", "expires_at": None}, "op")
    assert await meaning(catalog, acme, "pirate@1") == 1


async def test_a_version_is_served_once_it_is_validated(catalog: Catalog, acme: Tenant):
    await add(catalog, acme, "pirate", 1, state="validating")
    assert await meaning(catalog, acme, "pirate") is None
    assert await meaning(catalog, acme, "pirate@1") is None
    assert await catalog.list(acme) == []
    with pytest.raises(BadRequest, match="validated"):
        await catalog.versions.change(acme, "pirate", 1, {"state": "ready"}, "key")
    await catalog.versions.set_state(acme, "pirate", 1, "ready", "probe")
    await add(catalog, acme, "pirate", 2, 3, state="validating")
    assert await meaning(catalog, acme, "pirate") == 1
    reasons = [Reason(message="not finite", param="adapter_model.safetensors"), Reason(message="x" * 9000)]
    await catalog.versions.set_state(acme, "pirate", 2, "rejected", "probe", reasons)
    await catalog.versions.set_state(acme, "pirate", 3, "ready", "probe")
    assert await meaning(catalog, acme, "pirate") == 3
    assert await meaning(catalog, acme, "pirate@2") is None
    rejected = await catalog.versions.get(acme, "pirate", 2)
    assert (rejected.state, len(rejected.reasons), rejected.reasons[0]) == ("rejected", 2, reasons[0])
    for state in ("ready", "retired", "validating"):
        with pytest.raises(BadRequest, match="rejected and cannot"):
            await catalog.versions.set_state(acme, "pirate", 2, state, "probe")
    # A refused upload has a number, and none of them are kept without bound.
    for _ in range(KEPT_REFUSED + 2):
        await catalog.versions.refuse(acme, "broken", [Reason(message="no")])
    listed = await catalog.versions.list(acme, "broken")
    assert [each.version for each in listed] == list(range(3, KEPT_REFUSED + 3))
    assert {each.state for each in listed} == {"rejected"}
    assert await meaning(catalog, acme, "broken") is None
    await add(catalog, acme, "broken", 5)
    assert (await catalog.get(acme, "broken")).version == KEPT_REFUSED + 3


async def test_a_version_may_expire_while_it_is_validated(catalog: Catalog, acme: Tenant, database: Database):
    """Its state changes all the same; otherwise it would be probed for ever."""
    await add(catalog, acme, "pirate", 1)
    await add(catalog, acme, "pirate", 2, state="validating")
    async with database.write() as connection:
        past = datetime.now(UTC) - timedelta(seconds=1)
        await connection.execute(
            update(adapter_versions).where(adapter_versions.c.digest == digest(2)).values(expires_at=past)
        )
    assert (await catalog.versions.set_state(acme, "pirate", 2, "ready", "probe")).state == "retired"
    assert [await meaning(catalog, acme, text) for text in ("pirate", "pirate@2")] == [1, None]


async def test_a_version_in_use_is_deleted_only_by_force(catalog: Catalog, acme: Tenant):
    await add(catalog, acme, "pirate", 1, 2, 3)
    await catalog.aliases.move(acme, "pirate", "prod", [AliasTarget(1), AliasTarget(2)], "key")
    for number, uses in ((1, "alias 'prod'"), (2, "alias 'prod'"), (3, "alias 'latest'")):
        with pytest.raises(AdapterInUse, match=uses):
            await catalog.delete(acme, "pirate", "key", number)
        with pytest.raises(AdapterInUse, match=uses):
            await catalog.versions.change(acme, "pirate", number, {"state": "retired"}, "key")
    with pytest.raises(AdapterInUse, match="alias 'prod'"):
        await catalog.delete(acme, "pirate", "key")
    await catalog.delete(acme, "pirate", "key", 1, force=True)
    assert await meaning(catalog, acme, "pirate@1") is None
    assert {await meaning(catalog, acme, "pirate:prod") for _ in range(4)} == {2}
    await catalog.aliases.move(acme, "pirate", "prod", [AliasTarget(3)], "key", "*")
    with pytest.raises(AdapterInUse, match="running requests"):
        await catalog.delete(acme, "pirate", "key", 2, running={2})
    await catalog.delete(acme, "pirate", "key", 2, running={3})
    states = [(each.version, each.state) for each in await catalog.versions.list(acme, "pirate")]
    assert states == [(1, "deleted"), (2, "deleted"), (3, "ready")]
    await catalog.delete(acme, "pirate", "key", 3, force=True)
    assert await meaning(catalog, acme, "pirate") is None
    await add(catalog, acme, "pirate", 9)
    assert (await catalog.get(acme, "pirate")).version == 4
    assert await meaning(catalog, acme, "pirate:prod") is None


async def test_versions_in_use_and_pinned_ones_outlive_the_newest(catalog: Catalog, acme: Tenant):
    await add(catalog, acme, "pirate", 1, 2, 3)
    await catalog.aliases.move(acme, "pirate", "prod", [AliasTarget(1)], "key")
    await catalog.versions.change(acme, "pirate", 2, {"pinned": True}, "op")
    await add(catalog, acme, "pirate", *range(4, KEPT_VERSIONS + 5))
    served = [each.version for each in await catalog.versions.list(acme, "pirate") if each.state == "ready"]
    assert served == [1, 2, *range(5, KEPT_VERSIONS + 5)]
    # Changes hold the lock of the database or of the name, so their statements do not grow with the versions.
    targets = [[AliasTarget(number) for number in served[start : start + 8]] for start in range(0, len(served), 8)]
    for number, each in enumerate(targets):
        await catalog.aliases.move(acme, "pirate", f"a{number}", each, "key")
    statements = []
    listener = (Engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    event.listen(*listener)
    try:
        await add(catalog, acme, "pirate", *range(100, 110))
        with pytest.raises(AdapterInUse):
            await catalog.delete(acme, "pirate", "key")
    finally:
        event.remove(*listener)
    assert sum("FROM adapter_alias_targets" in text for text in statements) <= 11


async def test_latest_outlives_newer_versions_that_are_not_ready(catalog: Catalog, acme: Tenant):
    """`latest` keeps its version when it was rolled back, and while many newer uploads are validated or rejected."""
    await add(catalog, acme, "pirate", *range(1, KEPT_VERSIONS + 1))
    await catalog.aliases.move(acme, "pirate", "latest", [AliasTarget(1)], "key", "*")
    for number in range(KEPT_VERSIONS + 1, 2 * KEPT_VERSIONS + 2):
        await add(catalog, acme, "pirate", number, state="validating")
        assert await meaning(catalog, acme, "pirate") == 1, number
        await catalog.versions.set_state(acme, "pirate", number, "rejected", "probe")
    kept = [each.version for each in await catalog.versions.list(acme, "pirate") if each.state != "deleted"]
    assert kept == [1, *range(KEPT_VERSIONS + 2, 2 * KEPT_VERSIONS + 2)]
    # A newer version that is ready replaces it.
    await add(catalog, acme, "pirate", 99)
    assert [await meaning(catalog, acme, text) for text in ("pirate", "pirate@1")] == [99, None]


async def test_backfilled_usage_counts_names_with_any_version_of_the_content(
    catalog: Catalog, acme: Tenant, database: Database
):
    """`other` serves the content of `pirate` as its version 1, so its usage counts against the limits of `pirate`."""
    await add(catalog, acme, "pirate", 1)
    await add(catalog, acme, "other", 1, 2)
    await add(catalog, acme, "json", 3)
    # Refused uploads have no content that two names could share.
    for name in ("pirate", "json"):
        await catalog.versions.refuse(acme, name, [Reason(message="no")])
    used = {"tenant_id": acme.id, "created_at": NOON}
    rows = [row(name, model=name, cost=cost, **used) for name, cost in (("pirate", 1), ("other", 10), ("json", 100))]
    await UsageWriter(database).write(rows)
    past, period = PastUsage(database, only()), (NOON - timedelta(hours=1), NOON + timedelta(hours=1))
    assert await past.cost(acme.id, *period, UsagePart(models=("pirate",))) == 11
    assert await past.cost(acme.id, *period, UsagePart(besides=("pirate",))) == 100


async def test_an_adapter_of_the_release_before_keeps_its_version(database_url: str):
    """After the upgrade, an adapter's version is ready and is `latest`, and its next version has the next number."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))

    def to_0009(connection: Any) -> None:
        config.attributes["connection"] = connection
        command.upgrade(config, "0009")

    database = Database(database_url)
    tenant_columns = "id, name, weight, priority, on_token_limit, suspended, model_limits, created_at"
    old = "'2026-01-01 00:00:00'"
    async with database.write() as connection:
        await connection.run_sync(to_0009)
        for statement in (
            f"INSERT INTO tenants ({tenant_columns}) VALUES ('t', 'acme', 1, 0, 'reject', FALSE, '{{}}', {old})",
            f"INSERT INTO adapters VALUES ('a', 't', 'pirate', 1, {old})",
            f"INSERT INTO adapter_versions VALUES ('a', 1, '{digest(1)}', 8, 10, {old})",
            f"INSERT INTO removed_versions VALUES ('t', '{digest(2)}', 'pirate', 10, {old})",
        ):
            await connection.execute(sqlalchemy.text(statement))
    await database.upgrade()
    catalog, acme = Catalog(database, only()), await Tenants(database).get("acme")
    assert [await meaning(catalog, acme, each) for each in ("pirate", "pirate@1", "pirate:latest")] == [1, 1, 1]
    assert (await catalog.get(acme, "pirate")).state == "ready"
    latest = await catalog.aliases.get(acme, "pirate", "latest")
    await add(catalog, acme, "pirate", 3)
    assert await meaning(catalog, acme, "pirate") == await meaning(catalog, acme, "pirate@2") == 3
    with pytest.raises(PreconditionFailed):
        await catalog.aliases.move(acme, "pirate", "latest", [AliasTarget(1)], "key", latest.etag)
    assert (await catalog.aliases.rollback(acme, "pirate", "latest", "key")).targets == (AliasTarget(1),)
    # A gateway of the previous release moves `latest` without a tag.
    before = await catalog.aliases.get(acme, "pirate", "latest")
    async with database.write() as connection:
        await connection.execute(sqlalchemy.text("UPDATE adapters SET current_version = 2"))
    assert (await catalog.aliases.get(acme, "pirate", "latest")).etag != before.etag
    await database.close()
