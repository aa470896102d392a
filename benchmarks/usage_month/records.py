"""Made-up records beside the usage: tenants with keys, adapters and plans, changes, events, prices and sessions."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import Table

from benchmarks.usage_month.fillers import Filler
from benchmarks.usage_month.rows import ADAPTERS, ENGINES, NOW, TENANTS
from gateway.records.events.tables import event_deliveries, events, webhooks
from gateway.records.keys.session_table import sessions
from gateway.records.sql.tables import (
    adapter_versions,
    adapters,
    api_keys,
    audit,
    plans,
    prices,
    tenants,
    usage_rejected,
)

CHANGES, EVENTS, TARGETS, SESSIONS, REJECTED, PLANS, ADMIN_KEYS = 100_000, 20_000, 200, 2000, 1000, 20, 50
# Days that events and tenants' own changes are kept, less one.
KEPT_DAYS = 89
# Versions of the adapter that the benchmark of the pages opens, and further keys of each tenant.
VERSIONS, MORE_KEYS = 20, 4
AT_ONCE = 10_000
# Actions of the audit log by frequency, whether tenants do them, the new values and the earlier ones.
ACTIONS: tuple[tuple[int, str, bool, Mapping[str, Any], Mapping[str, Any] | None], ...] = (
    (30, "adapter.push", True, {"version": 2, "digest": "sha256:" + "d" * 64, "num_bytes": 2**24}, None),
    (20, "adapter.alias", True, {"targets": [{"version": 2, "weight": 100}], "before": None}, None),
    (20, "session.open", True, {"role": "tenant_admin", "label": "production"}, None),
    (10, "tenant.update", False, {"requests_per_minute": 600, "weight": 2.0}, {"requests_per_minute": 300}),
    (5, "key.create", True, {"label": "staging", "scopes": ["inference", "usage"]}, None),
    (5, "key.rotate", True, {"predecessor": "0" * 16}, None),
    (5, "login.failed", False, {"reason": "wrong key"}, None),
    (5, "price.put", False, {"input": 200_000, "output": 600_000}, {"input": 100_000, "output": 600_000}),
)
# Types of events by frequency, with their data.
EVENT_DATA: tuple[tuple[int, str, Mapping[str, Any]], ...] = (
    (40, "budget.threshold", {"threshold": 0.8, "budget": 10**8, "spent": 8 * 10**7, "period": "month"}),
    (10, "budget.exhausted", {"budget": 10**8, "spent": 10**8, "period": "month"}),
    (20, "key.expiring", {"key_id": "0" * 16, "label": "production"}),
    (20, "adapter.rejected", {"adapter": "adapter-2@3"}),
    (5, "engine.down", {"engine": "http://engine-1:8000", "reason": "no answer"}),
    (5, "engine.up", {"engine": "http://engine-1:8000"}),
)


async def fill_owners(filler: Filler) -> None:
    """Write the tenants, half of them with a budget, their keys and their adapters."""
    chance, began = random.Random(2), NOW - timedelta(days=90)
    owners, keys, names, versions = [], [], [], []
    terms = {"weight": 1.0, "priority": 0, "on_token_limit": "stop", "suspended": False, "model_limits": "{}"}
    state = {"rank": 16, "num_bytes": 2**24, "state": "ready", "pinned": False, "version": 1}
    for tenant in range(1, TENANTS + 1):
        own = {"id": tenant_id(tenant), "name": f"tenant-{tenant}", "created_at": began}
        if tenant % 2:
            budget = 10 ** chance.randint(5, 9)
            own |= {"budget_per_month": budget, "limits": f'{{"budget_per_month":{budget}}}'}
        owners.append(own | terms)
        key = {"id": f"{tenant:016}", "tenant_id": own["id"], "label": "production", "scopes": "inference"}
        keys.append(key | {"secret_hash": f"{tenant:064}", "created_at": began, "last_used_at": NOW})
        for i in range(2, ADAPTERS + 2):
            adapter = {"id": f"{tenant:028}{i:04}", "tenant_id": own["id"], "name": f"adapter-{i}"}
            names.append(adapter | {"current_version": 1, "created_at": began})
            digest = f"{chance.getrandbits(256):064x}"
            versions.append(state | {"adapter_id": adapter["id"], "digest": digest, "created_at": began})
    for table, made in ((tenants, owners), (api_keys, keys), (adapters, names), (adapter_versions, versions)):
        await write(filler, table, made)


async def fill_more(filler: Filler) -> None:
    """Write what the pages beside those of usage show: changes, events, prices, plans, sessions and further keys."""
    chance = random.Random(3)
    await write(filler, api_keys, _more_keys(chance))
    await write(filler, adapter_versions, _more_versions(chance))
    await write(filler, audit, _changes(chance))
    await write(filler, events, _events(chance))
    await write(filler, webhooks, _targets(chance))
    await write(filler, event_deliveries, _deliveries(chance))
    await write(filler, prices, _prices(chance))
    await write(filler, plans, ({"name": f"plan-{i}", "terms": "{}", "prices": "{}", "updated_at": NOW}
                                for i in range(1, PLANS + 1)))  # fmt: skip
    await filler.execute("UPDATE tenants SET plan = 'plan-1' WHERE name LIKE 'tenant-1%'")
    await write(filler, sessions, _sessions(chance))
    await write(filler, usage_rejected, _rejected(chance))


async def write(filler: Filler, table: Table, made: Iterable[Mapping[str, Any]]) -> None:
    """Write records, whose missing columns are NULL."""
    names, rows = table.c.keys(), []
    for each in made:
        rows.append(tuple(each.get(name) for name in names))
        if len(rows) == AT_ONCE:
            await filler.write(table, rows)
            rows = []
    await filler.write(table, rows)


def tenant_id(tenant: int) -> str:
    return f"{tenant:032}"


def event_id(number: int) -> str:
    return f"e{number:031}"


def target_id(number: int) -> str:
    return f"a{number:031}"


def _one(chance: random.Random, numbers: int) -> int:
    """Return a number from 1 on, by Zipf's law."""
    return int(numbers ** chance.random())


def _more_keys(chance: random.Random) -> Iterator[dict[str, Any]]:
    for i in range(1, MORE_KEYS * TENANTS + ADMIN_KEYS + 1):
        tenant, at = (i - 1) // MORE_KEYS + 1, NOW - timedelta(days=KEPT_DAYS * chance.random())
        key = {"id": f"a{i:015}", "secret_hash": f"a{i:063}", "created_at": at, "last_used_at": NOW}
        if tenant > TENANTS:
            yield key | {
                "label": f"operator-{i - MORE_KEYS * TENANTS}",
                "scopes": ("viewer", "billing", "admin")[i % 3],
            }
            continue
        label = ("staging", "evaluation", "batch", "former")[i % MORE_KEYS]
        ended = {"revoked_at": NOW - timedelta(days=1)} if label == "former" else {}
        yield key | {"tenant_id": tenant_id(tenant), "label": label, "scopes": "inference,usage"} | ended


def _more_versions(chance: random.Random) -> Iterator[dict[str, Any]]:
    for version in range(2, VERSIONS + 1):
        yield {
            "adapter_id": f"{1:028}{2:04}",
            "version": version,
            "digest": f"{chance.getrandbits(256):064x}",
            "rank": 16,
            "num_bytes": 2**24,
            "created_at": NOW - timedelta(days=KEPT_DAYS - version),
            "state": "ready",
            "pinned": False,
        }


def _changes(chance: random.Random) -> Iterator[dict[str, Any]]:
    weights = [action[0] for action in ACTIONS]
    for i, (_, action, own, detail, before) in enumerate(chance.choices(ACTIONS, weights, k=CHANGES)):
        tenant, adapter = _one(chance, TENANTS), _one(chance, ADAPTERS) + 1
        name, operator = f"tenant-{tenant}", 1 + i % ADMIN_KEYS
        targets = {
            "adapter.push": f"{name}/adapter-{adapter}@2",
            "adapter.alias": f"{name}/adapter-{adapter}:latest",
            "tenant.update": name,
            "price.put": f"{name}/*",
        }
        yield {
            "id": f"{i:032x}",
            "at": NOW - timedelta(days=KEPT_DAYS * chance.random()),
            "actor": f"{tenant:016}" if own else f"a{MORE_KEYS * TENANTS + operator:015}",
            "actor_label": "production" if own else f"operator-{operator}",
            "action": action,
            "target": targets.get(action, f"{tenant:016}"),
            "tenant": None if action in ("price.put", "login.failed") else name,
            "address": f"192.0.2.{i % 250}",
            "request_id": f"req_{i:032x}",
            "detail": json.dumps(detail),
            "own": own,
            "before": None if before is None else json.dumps(before),
        }


def _events(chance: random.Random) -> Iterator[dict[str, Any]]:
    weights = [kind[0] for kind in EVENT_DATA]
    for i, (_, kind, data) in enumerate(chance.choices(EVENT_DATA, weights, k=EVENTS)):
        tenant = _one(chance, TENANTS)
        owner = {} if "engine" in data else {"tenant_id": tenant_id(tenant), "tenant": f"tenant-{tenant}"}
        at = NOW - timedelta(days=KEPT_DAYS * chance.random())
        yield owner | {"id": event_id(i), "once": f"{i}", "type": kind, "data": json.dumps(data), "created_at": at}


def _targets(chance: random.Random) -> Iterator[dict[str, Any]]:
    """Yield targets of events, half of them tenants'. Their only type does not happen while the pages are measured."""
    for i in range(1, TARGETS + 1):
        fails = {"failures": 5, "error": "no connection"} if i % 40 == 0 else {"failures": 0}
        yield fails | {
            "name": f"target-{i}",
            "id": target_id(i),
            "tenant_id": tenant_id(i) if i % 2 == 0 else None,
            "url": f"https://hooks-{i}.example/events",
            "types": ",keys.guessed,",
            "created_at": NOW - timedelta(days=90),
            "delivered_at": NOW - timedelta(days=chance.random()),
        }


def _deliveries(chance: random.Random) -> Iterator[dict[str, Any]]:
    for i in range(EVENTS):
        for target in {1, 3, 1 + int(TARGETS * chance.random())}:
            state = "failed" if chance.random() < 0.02 else "delivered"
            yield {
                "event_id": event_id(i),
                "webhook_id": target_id(target),
                "state": state,
                "attempts": 1,
                "created_at": NOW - timedelta(days=KEPT_DAYS * chance.random()),
            }


def _prices(chance: random.Random) -> Iterator[dict[str, Any]]:
    names = ["base", *(f"tenant-{i}/{model}" for i in range(1, TENANTS + 1) for model in ("*", "adapter-2"))]
    for name in names:
        amount = 1000 * chance.randint(50, 500)
        yield {"model": name, "input": amount, "cached": amount // 4, "output": 3 * amount, "updated_at": NOW}


def _sessions(chance: random.Random) -> Iterator[dict[str, Any]]:
    """Yield sessions of tenants' keys. A benchmark that shows them prolongs them first."""
    for i in range(SESSIONS):
        tenant = i % TENANTS + 1
        yield {
            "id": f"{i:016x}",
            "token_hash": f"{i:064}",
            "subject": f"{tenant:016}",
            "label": "production",
            "role": "tenant_member",
            "tenant_id": tenant_id(tenant),
            "key_id": f"{tenant:016}",
            "address": f"192.0.2.{i % 250}",
            "created_at": NOW - timedelta(hours=chance.random()),
            "last_used_at": NOW,
            "expires_at": NOW + timedelta(hours=12),
        }


def _rejected(chance: random.Random) -> Iterator[dict[str, Any]]:
    for i in range(REJECTED):
        at = NOW - timedelta(days=KEPT_DAYS * chance.random())
        event = json.dumps({"request_id": f"req_{i:032x}", "engine": f"http://engine-{i % ENGINES}:8000"})
        yield {"id": f"{i:064x}", "reason": "not a usage row: no tenant", "event": event, "rejected_at": at}
