"""The engine kinds as a gateway makes them, for tests of single parts."""

from pathlib import Path
from typing import Any
from unittest.mock import NonCallableMock

from aiohttp import ClientSession

from adapters.open_store import open_store
from gateway.fleet.kinds.kind import Services
from gateway.fleet.kinds.last_uses import LastUses
from gateway.fleet.kinds.table import Kinds, make_kinds
from testing.gateway.running import BASE_MODEL
from testing.gateway.upstream import TOKEN


def kinds_of(session: ClientSession, store: Path | None = None, redis: Any = None) -> Kinds:
    """Return the kinds. store: the adapter store, needed for loads only. redis: None for an unshared process."""
    return make_kinds(
        Services(
            session=session,
            internal_token=TOKEN,
            base_names=lambda: [BASE_MODEL],
            # Without a store every use of it fails.
            store=open_store(store) if store is not None else NonCallableMock(spec_set=()),
            uses=LastUses(redis, 10.0),
        )
    )
