"""In-memory copy of the base models. Code that needs a model's name, engines or price reads only this copy.

Every gateway process reloads the copy after a change, so that no request waits for SQL.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.errors import Unavailable
from gateway.records.bases.base import Base
from gateway.records.bases.checks import reserved_names
from gateway.records.bases.records import BaseRecords, BasesLocked
from gateway.records.caches.changes import BASES, LOOK_SECONDS, TRUST_SECONDS, Changes
from gateway.setting_errors import NotUsableNow
from wire.digests import digest_name

# Seconds after which every gateway that reaches the database knows a change.
KNOWN_SECONDS = TRUST_SECONDS + LOOK_SECONDS
# Number of characters of a digest in messages.
SHOWN_DIGEST = 12


class NoBase(Exception):
    """The engine serves no base model of this deployment. The message tells the operator the reason and the remedy."""


class Bases:
    """Base models of the deployment.

    own: the base of LORAPLEX_BASE_MODEL; its tokenizer, shape and context length come from this process's settings
    instead of the table. None without the setting.
    """

    def __init__(self, records: BaseRecords | None = None, own: Base | None = None) -> None:
        self._records = records
        self._own = own
        # Called after each change that this process reads.
        self.changed: Callable[[], None] = lambda: None
        self._set([] if own is None else [own])

    @property
    def own(self) -> Base | None:
        """Return the base of LORAPLEX_BASE_MODEL; None without the setting."""
        return self._own

    @property
    def all(self) -> Sequence[Base]:
        """Return all bases, the oldest first."""
        return self._all

    @property
    def listed(self) -> Sequence[Base]:
        """Return the active bases: they are listed and accept adapters."""
        return [base for base in self._all if base.state == "active"]

    @property
    def names(self) -> Sequence[str]:
        """Return the names of all bases, including retired ones."""
        return [base.name for base in self._all]

    @property
    def shown(self) -> str:
        """Return the names of the listed bases, for messages."""
        return ", ".join(f"'{base.name}'" for base in self.listed) or "none"

    @property
    def first(self) -> Base | None:
        """Return the oldest listed base, the default of lists and examples; None if there is none."""
        return next(iter(self.listed), None)

    def named(self, name: str) -> Base | None:
        """Return the base with this name, in any state; None if there is none."""
        return self._by_name.get(name)

    def get(self, base_id: str) -> Base | None:
        """Return the base with this id; None if there is none."""
        return self._by_id.get(base_id)

    def of_model(self, base_id: str) -> Base:
        """Return the base with this id. Raises Unavailable if this process does not know it yet."""
        base = self._by_id.get(base_id)
        if base is None:
            raise Unavailable("The model's base model is not known here yet; try again shortly.")
        return base

    def name_of(self, base_id: str) -> str | None:
        """Return the name of the base with this id; None if there is none."""
        base = self._by_id.get(base_id)
        return None if base is None else base.name

    def is_reserved(self, name: str) -> bool:
        """Return whether no adapter may have the name (see `reserved_names`)."""
        return name in self._reserved

    def served_by(self, model: str | None, digest: str | None) -> Base:
        """Return the base that an engine serves. Raises NoBase.

        model, digest: as the engine reports them. The digest decides. If the engine or the base has none, the name
        decides. An engine that reports neither serves the only base.
        """
        if digest is not None:
            for base in self._all:
                if digest in base.digests:
                    return base
        named = self._by_name.get(model) if model is not None else None
        if model is None and len(self._all) == 1:
            named = self._all[0]
        if named is not None and (digest is None or named.digest is None):
            return named
        raise NoBase(self._misfit(model, digest, named))

    def _misfit(self, model: str | None, digest: str | None, named: Base | None) -> str:
        what = f"engine serves {model or 'a model without a name'}"
        if named is not None:
            assert digest is not None
            assert named.digest is not None
            return (
                f"{what} with the weights {digest_name(digest[:SHOWN_DIGEST])}..., not "
                f"{digest_name(named.digest[:SHOWN_DIGEST])}...; start it with the right model, or `loraplex base "
                f"replace {named.name} --digest {digest}`"
            )
        names = " or ".join(self.names) or "any base model on record"
        own = f"start it with --served-model-name {self.names[0]}, or " if len(self._all) == 1 else ""
        return f"{what}, not {names}; {own}add its base model: `loraplex base add`"

    async def refresh(self) -> None:
        """Reload all bases. Raises Unavailable and keeps the previous ones."""
        if self._records is not None:
            self._set([self._localised(base) for base in await self._records.list()])

    async def add(self, base: Base, actor: str) -> Base:
        """Add a base (see `BaseRecords.add`) and wait until every process knows it."""
        base = await self._table.add(base, actor)
        await self._make_known()
        return base

    async def change(
        self, name: str, changes: dict[str, Any], actor: str, *, force: bool = False, seen: Base | None = None
    ) -> Base:
        """Change a base (see `BaseRecords.change`) and wait until every process knows the change."""
        base = await self._table.change(name, changes, actor, force=force, seen=seen)
        await self._make_known()
        return base

    @property
    def _table(self) -> BaseRecords:
        if self._records is None:
            raise RuntimeError("these base models are not on record")
        return self._records

    async def _make_known(self) -> None:
        """Reload after a change by this process, and wait until every other process has reloaded too."""
        await self._read_again()
        await asyncio.sleep(KNOWN_SECONDS)

    async def start(self) -> None:
        """Store the base of LORAPLEX_BASE_MODEL, and load all bases. Raises Conflict, NotUsableNow, Unavailable."""
        if self._records is not None and self._own is not None:
            try:
                await self._records.ensure(self._own)
            except BasesLocked as error:
                raise NotUsableNow("LORAPLEX_DATABASE_URL", error.message) from error
        await self.refresh()

    async def watch(self, changes: Changes) -> None:
        """Reload the bases after each change, until cancelled. Run it as a task."""
        await changes.follow(BASES, self._read_again)

    async def _read_again(self) -> None:
        await self.refresh()
        self.changed()

    def _localised(self, base: Base) -> Base:
        """Return a base with the fields that this process reads from its own settings."""
        own = self._own
        if own is None or own.name != base.name:
            return base
        local = {"tokenizer": own.tokenizer, "shape": own.shape, "context_length": own.context_length}
        return msgspec.structs.replace(base, **local)

    def _set(self, bases: Sequence[Base]) -> None:
        self._all = tuple(bases)
        self._by_name = {base.name: base for base in bases}
        self._by_id = {base.id: base for base in bases}
        self._reserved = reserved_names(self.names)
