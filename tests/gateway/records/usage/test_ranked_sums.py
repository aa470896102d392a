"""Every sum that a page of usage shows equals the sum over the ledger's rows, for each group and period."""

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.billing.writer import UsageWriter
from gateway.records.sql.database import Database
from gateway.records.usage.ranked_groups import KEYS, MEASURES, GroupBy, Measure, Part, identity_of
from gateway.records.usage.ranking import UsageRanking
from gateway.records.usage.rows import UsageFilter
from gateway.records.usage.steps import total_of
from gateway.records.usage.tenant_sums import SUMMED
from gateway.usage_row import UsageRow
from testing.gateway.rows import row
from tests.gateway.conftest import BOTH, new_database

NOW = datetime.now(UTC)
TODAY = NOW.replace(hour=0, minute=0, second=0, microsecond=0)
WHOLE = Part(criteria=UsageFilter(), since=TODAY - timedelta(days=4), until=None)
EDGES = Part(criteria=UsageFilter(), since=NOW - timedelta(days=4, hours=7), until=NOW - timedelta(hours=5))
BEFORE = Part(criteria=UsageFilter(), since=TODAY - timedelta(days=9), until=TODAY - timedelta(days=4))
LIMIT = 7


def rows(seed: int) -> list[UsageRow]:
    """Return usage of nine tenants whose models, keys and end users have the same names."""
    chance = random.Random(seed)
    found = []
    for i in range(400):
        tenant, model = int(9 ** chance.random()), chance.choice(("base", "m1", "m2", "m3", "m1*0.5+m2*0.5"))
        found.append(
            row(
                f"r{i}",
                tenant_id=f"t{tenant}",
                tenant=f"n{tenant}",
                key_id=f"k{tenant}{chance.randrange(3)}",
                model=model,
                # A mixture has no digest; some tenants have an adapter of the base model's name.
                adapter_digest="d" if model in ("m1", "m2", "m3") or (model == "base" and tenant == 3) else None,
                end_user=chance.choice((None, *(f"u{j}" for j in range(9)))),
                **{name: chance.randrange(50) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")},
                cost=chance.randrange(1000),
                created_at=NOW - timedelta(seconds=chance.randrange(9 * 86400)),
            )
        )
    return found


@pytest.fixture(scope="module")
def seed(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module", params=BOTH)
def filled_url(request: pytest.FixtureRequest, seed: int, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URL of a database with the rows of a seed, which tests only read: the writing is slow."""
    if request.param == "postgres":
        postgres, template = request.getfixturevalue("postgres"), request.getfixturevalue("migrated_template")
        url = postgres.get_uri(database=asyncio.run(new_database(postgres, template)))
    else:
        path: Path = tmp_path_factory.mktemp("ranked") / "records.db"
        shutil.copy(request.getfixturevalue("migrated"), path)
        url = f"sqlite:///{path}"

    async def write() -> None:
        database = Database(url)
        await UsageWriter(database).write(rows(seed))
        await database.close()

    asyncio.run(write())
    return url


@pytest.fixture
async def filled(filled_url: str) -> AsyncIterator[Database]:
    database = Database(filled_url)
    yield database
    await database.close()


def sums_of(used: list[UsageRow], part: Part, group_by: GroupBy) -> dict[tuple[Any, ...], Counter[str]]:
    found: dict[tuple[Any, ...], Counter[str]] = {}
    for each in used:
        if part.since <= each.created_at < (part.until or NOW + timedelta(hours=1)):
            key = tuple(getattr(each, name) or "" for name in KEYS[group_by])
            found.setdefault(key, Counter()).update(
                requests=1, **{name: getattr(each, name) for name in SUMMED if name != "requests"}
            )
    return found


@pytest.mark.parametrize("group_by", ["tenant", "model", "key", "end_user"])
@pytest.mark.parametrize("part", [WHOLE, EDGES], ids=["whole days", "edges"])
@pytest.mark.parametrize("seed", [1, 2], indirect=True, scope="module")
async def test_pages_have_every_group_with_the_sums_of_its_rows(
    filled: Database, part: Part, group_by: GroupBy, seed: int
):
    used, ranking = rows(seed), UsageRanking(filled)
    expected, before = sums_of(used, part, group_by), sums_of(used, BEFORE, group_by)
    for measure in MEASURES:
        found: dict[tuple[Any, ...], dict[str, int]] = {}
        order: list[int] = []
        for offset in range(0, len(expected), LIMIT):
            page = await ranking.groups(part, group_by, measure, offset=offset, limit=LIMIT)
            for group in await ranking.earlier(BEFORE, group_by, page.groups, measure):
                identity = identity_of(group, group_by)
                found[identity] = {name: getattr(group, name) for name in SUMMED}
                order.append(getattr(group, measure))
                assert group.before == value_of(before.get(identity, Counter()), measure)
        assert found == {identity: {name: sums[name] for name in SUMMED} for identity, sums in expected.items()}
        assert order == sorted((value_of(sums, measure) for sums in expected.values()), reverse=True)
    total = {name: sum(sums[name] for sums in expected.values()) for name in SUMMED}
    assert await ranking.total(part) == total_of(await ranking.steps(part, "day")) == total


@pytest.mark.parametrize("group_by", ["model", "end_user"])
@pytest.mark.parametrize("seed", [3], indirect=True, scope="module")
async def test_curves_are_those_of_the_groups_rows(filled: Database, group_by: GroupBy, seed: int):
    used, ranking = rows(seed), UsageRanking(filled)
    page = await ranking.groups(WHOLE, group_by, "cost", limit=8)
    steps = await ranking.steps(WHOLE, "day")
    curves = await ranking.curves(WHOLE, group_by, page.groups, "cost", "day", steps)
    assert len(curves.groups) == 8
    for i, start in enumerate(curves.starts):
        day = msgspec.structs.replace(WHOLE, since=start, until=start + timedelta(days=1))
        expected = sums_of(used, day, group_by)
        for group, values in curves.groups:
            assert values[i] == expected.get(identity_of(group, group_by), Counter())["cost"]
        assert curves.total[i] == sum(sums["cost"] for sums in expected.values())


def value_of(sums: Counter[str], measure: Measure) -> int:
    return sums["prompt_tokens"] + sums["completion_tokens"] if measure == "tokens" else sums[measure]
