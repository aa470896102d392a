"""Who changed what. A row is written in the same transaction as the change it tells of."""

import uuid
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.tables import audit


async def record_change(
    connection: AsyncConnection, actor: str, action: str, target: str, detail: dict[str, Any] | None = None
) -> None:
    """actor: the id of the key that asked. action: "tenant.create" and the like. detail: never a secret."""
    await connection.execute(
        insert(audit).values(
            id=uuid.uuid4().hex,
            at=datetime.now(UTC),
            actor=actor,
            action=action,
            target=target,
            detail=msgspec.json.encode(detail or {}).decode(),
        )
    )
