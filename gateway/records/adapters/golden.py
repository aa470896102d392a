"""Golden answers of adapters' versions: a tenant's evaluation prompts, their answers, and the checks since then.

The deletion of a version removes them.
"""

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Row, and_, delete, exists, func, insert, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import AdapterLimitExceeded, RecordNotFound
from gateway.records.adapters.rows import check_possible, lock_known_name, lock_tenant, unknown_version, versions_of
from gateway.records.audit import record_change
from gateway.records.bases.base import EngineSoftware
from gateway.records.bases.records import of_base
from gateway.records.sql.database import Database
from gateway.records.sql.tables import (
    adapter_probes,
    adapter_versions,
    adapters,
    golden_answers,
    golden_checks,
    tenants,
)
from gateway.records.tenants.tenants import Tenant
from gateway.records.version_state import READY
from wire.model_names import version_name

# Limit of a tenant's versions with golden answers. It bounds the background checks, for which no quota pays.
MAX_SETS = 32
# Limit of a version's checks on record, each under another engine software.
KEPT_CHECKS = 16


class GoldenPrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An evaluation prompt: either `messages` of a chat or the text `prompt`."""

    max_tokens: int
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None


class GoldenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The greedy answer to a prompt, and the software of the engine that made it."""

    text: str
    software: EngineSoftware


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt whose answer differs from the golden one.

    prompt: its index. position: index of the first differing token of the text. agreement: number of equal tokens
    before it, as a share of the longer answer's tokens. text: the new answer. error: the reason if there is no answer.
    """

    prompt: int
    position: int | None = None
    agreement: float = 0.0
    text: str | None = None
    error: str | None = None


class GoldenCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Result of asking all prompts of a version again under one engine software."""

    software: EngineSoftware
    differences: tuple[Difference, ...]
    checked_at: datetime


class GoldenSet(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts and golden answers of a version. tag: changes with each replacement. checks: the newest first."""

    tag: str
    prompts: tuple[GoldenPrompt, ...]
    answers: tuple[GoldenAnswer, ...]
    created_at: datetime
    checks: tuple[GoldenCheck, ...] = ()


class Unchecked(msgspec.Struct, frozen=True, kw_only=True):
    """A version whose golden answers have no check under a software. place: orders the versions."""

    tenant_id: str
    tenant_name: str
    name: str
    version: int
    place: tuple[str, int]


class Golden:
    """Tables of golden answers and their checks. Raises RecordNotFound for absent and foreign versions alike."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def check_room(self, tenant: Tenant, name: str, version: int) -> None:
        """Raise AdapterLimitExceeded if the tenant has golden answers of MAX_SETS other versions."""
        async with self._database.read() as connection:
            await _check_room(connection, tenant, name, version)

    async def put(
        self,
        tenant: Tenant,
        name: str,
        version: int,
        prompts: Sequence[GoldenPrompt],
        answers: Sequence[GoldenAnswer],
        actor: str,
    ) -> GoldenSet:
        """Replace the golden answers of a version. If one engine software made all of them, it counts as checked."""
        now = datetime.now(UTC)
        softwares = {answer.software for answer in answers}
        checks = [GoldenCheck(software=each, differences=(), checked_at=now) for each in softwares]
        made = GoldenSet(
            tag=uuid.uuid4().hex,
            prompts=tuple(prompts),
            answers=tuple(answers),
            created_at=now,
            checks=tuple(checks) if len(checks) == 1 else (),
        )
        table = golden_answers
        async with self._database.write() as connection:
            own = await lock_known_name(connection, tenant.id, name)
            if version not in await versions_of(connection, tenant.id, name):
                raise unknown_version()
            await lock_tenant(connection, tenant.id)
            await _check_room(connection, tenant, name, version)
            key = {"adapter_id": own.id, "version": version}
            await connection.execute(delete(table).where(table.c.adapter_id == own.id, table.c.version == version))
            texts = {"prompts": _text(made.prompts), "answers": _text(made.answers)}
            await connection.execute(insert(table).values(**key, **texts, tag=made.tag, created_at=now))
            for check in made.checks:
                await connection.execute(insert(golden_checks).values(**key, **_check_row(check)))
            target = f"{tenant.name}/{version_name(name, version)}"
            detail = {"prompts": len(prompts)}
            await record_change(connection, actor, "adapter.golden", target, detail, tenant=tenant.name)
        return made

    async def get(self, tenant: Tenant, name: str, version: int) -> GoldenSet:
        """Return the golden answers of a version with their checks."""
        async with self._database.read() as connection:
            row = await _find(connection, tenant, name, version)
            table = golden_checks
            query = (
                select(table)
                .where(table.c.adapter_id == row.adapter_id, table.c.version == version)
                .order_by(table.c.checked_at.desc())
            )
            checks = (await connection.execute(query)).all()
        return GoldenSet(
            tag=row.tag,
            prompts=msgspec.json.decode(row.prompts, type=tuple[GoldenPrompt, ...]),
            answers=msgspec.json.decode(row.answers, type=tuple[GoldenAnswer, ...]),
            created_at=row.created_at,
            checks=tuple(map(_read_check, checks)),
        )

    async def delete(self, tenant: Tenant, name: str, version: int, actor: str) -> None:
        """Remove the golden answers of a version."""
        table = golden_answers
        async with self._database.write() as connection:
            row = await _find(connection, tenant, name, version)
            await connection.execute(
                delete(table).where(table.c.adapter_id == row.adapter_id, table.c.version == version)
            )
            target = f"{tenant.name}/{version_name(name, version)}"
            await record_change(connection, actor, "adapter.golden", target, {"deleted": True}, tenant=tenant.name)

    async def record(self, tenant: Tenant, name: str, version: int, tag: str, check: GoldenCheck) -> None:
        """Keep a check, unless the set of the tag has been replaced or removed."""
        table = golden_checks
        async with self._database.write() as connection:
            try:
                # The row is read under the name's lock, because `put` may be replacing the set.
                await lock_known_name(connection, tenant.id, name)
                row = await _find(connection, tenant, name, version)
            except RecordNotFound:
                return
            if row.tag != tag:
                return
            this = and_(table.c.adapter_id == row.adapter_id, table.c.version == version)
            values = _check_row(check)
            same = [table.c[column] == values[column] for column in ("engine_kind", "engine_version", "base_digest")]
            await connection.execute(delete(table).where(this, *same))
            await connection.execute(insert(table).values(adapter_id=row.adapter_id, version=version, **values))
            times = select(table.c.checked_at).where(this).order_by(table.c.checked_at.desc())
            old = (await connection.execute(times.offset(KEPT_CHECKS).limit(1))).scalar_one_or_none()
            if old is not None:
                await connection.execute(delete(table).where(this, table.c.checked_at <= old))

    async def unchecked(self, software: EngineSoftware, base: str, after: tuple[str, int]) -> Unchecked | None:
        """Return the first ready version behind the place `after` that has no check under the software.

        Versions that do not belong to the base model (its id), or are bound to other weights, are left out.
        """
        answers, checks, own, probes = golden_answers, golden_checks, adapter_versions, adapter_probes
        is_checked = exists().where(
            checks.c.adapter_id == answers.c.adapter_id,
            checks.c.version == answers.c.version,
            checks.c.engine_kind == software.kind,
            checks.c.engine_version == software.version,
            checks.c.base_digest == software.base_digest,
        )
        place = tuple_(answers.c.adapter_id, answers.c.version)
        query = (
            select(tenants.c.id.label("tenant_id"), tenants.c.name.label("tenant_name"))
            .add_columns(adapters.c.name, own.c.version, answers.c.adapter_id)
            .join_from(answers, own, _same_version(answers, own))
            .join(adapters, adapters.c.id == own.c.adapter_id)
            .join(tenants, tenants.c.id == adapters.c.tenant_id)
            .outerjoin(probes, _same_version(answers, probes))
            .where(
                ~is_checked, of_base(base), own.c.state == READY, tenants.c.suspended.is_(False), place > tuple_(*after)
            )
            .where(or_(own.c.expires_at.is_(None), own.c.expires_at > datetime.now(UTC)))
            .order_by(answers.c.adapter_id, answers.c.version)
            .limit(1)
        )
        if software.base_digest:
            bound = probes.c.base_digest
            query = query.where(or_(bound.is_(None), bound == software.base_digest))
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            return None
        return Unchecked(
            tenant_id=row.tenant_id,
            tenant_name=row.tenant_name,
            name=row.name,
            version=row.version,
            place=(row.adapter_id, row.version),
        )


async def _check_room(connection: AsyncConnection, tenant: Tenant, name: str, version: int) -> None:
    table = golden_answers
    this = and_(adapters.c.name == name, table.c.version == version)
    others = (
        select(func.count())
        .select_from(table)
        .join(adapters, adapters.c.id == table.c.adapter_id)
        .where(adapters.c.tenant_id == tenant.id, ~this)
    )
    if (await connection.execute(others)).scalar_one() >= MAX_SETS:
        raise AdapterLimitExceeded(
            f"This tenant has golden answers of {MAX_SETS} versions, the most that are allowed; remove those of "
            "another version first.",
            param="prompts",
        )


async def _find(connection: AsyncConnection, tenant: Tenant, name: str, version: int) -> Row[Any]:
    """Return the row of a version's golden answers. Raises RecordNotFound."""
    check_possible(name)
    table, own = golden_answers, adapter_versions
    joined = adapters.join(own, own.c.adapter_id == adapters.c.id).outerjoin(table, _same_version(table, own))
    query = (
        select(table)
        .select_from(joined)
        .where(adapters.c.tenant_id == tenant.id, adapters.c.name == name, own.c.version == version)
    )
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise unknown_version()
    if row.tag is None:
        raise RecordNotFound("The version has no golden answers.", param="version")
    return row


def _same_version(one: Any, other: Any) -> Any:
    return and_(one.c.adapter_id == other.c.adapter_id, one.c.version == other.c.version)


def _check_row(check: GoldenCheck) -> dict[str, Any]:
    return {
        "engine_kind": check.software.kind,
        "engine_version": check.software.version,
        "base_digest": check.software.base_digest,
        "differences": _text(check.differences),
        "checked_at": check.checked_at,
    }


def _read_check(row: Row[Any]) -> GoldenCheck:
    software = EngineSoftware(kind=row.engine_kind, version=row.engine_version, base_digest=row.base_digest)
    differences = msgspec.json.decode(row.differences, type=tuple[Difference, ...])
    return GoldenCheck(software=software, differences=differences, checked_at=row.checked_at)


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
