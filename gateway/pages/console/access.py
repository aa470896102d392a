"""Base of the console's pages: the scope that each handler requires, and the limiter of tenants' database reads."""

import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from aiohttp import web

from gateway.access.auth import TenantPrincipal
from gateway.api.scopes import PRINCIPAL
from gateway.components import Records
from gateway.errors import Forbidden
from gateway.pages.frame.frame import Frame
from gateway.quota.quota import Quota
from gateway.records.bases.registry import Bases
from gateway.sharing.concurrency import ConcurrencyLimiter

HOME = "/console/"
# Maximum concurrent reads, at most one per tenant; and a tenant's pause after a read, as a factor of its duration.
READS, REST = 4, 2.0

Needed = Literal["inference", "adapters", "usage", "keys", "any"]
"""Scope that a page needs; `any`: every session of a tenant."""


@dataclass(frozen=True, slots=True)
class Console:
    """Objects that all pages of the console share. currency: that of costs and budgets. bases: the base models."""

    frame: Frame
    records: Records
    quota: Quota
    currency: str
    bases: Bases
    reads: ConcurrencyLimiter = field(default_factory=lambda: ConcurrencyLimiter(READS, rest=REST))

    @property
    def base_names(self) -> list[str]:
        """Return the names of the listed base models."""
        return [base.name for base in self.bases.listed]

    def base_model(self, principal: TenantPrincipal) -> str:
        """Return the base model of examples, which the key may use."""
        return next((name for name in self.base_names if principal.may_use(name)), "base-model")


class ConsolePages:
    """Base of each group of pages."""

    def __init__(self, console: Console) -> None:
        self.console = console


Pages = TypeVar("Pages")
Handler = Callable[[Pages, web.Request], Coroutine[Any, Any, web.StreamResponse]]


def needs(scope: Needed) -> Callable[[Handler[Pages]], Handler[Pages]]:
    """Return a decorator for a handler that only sessions with this scope may call. Others get Forbidden."""

    def wrap(handler: Handler[Pages]) -> Handler[Pages]:
        @functools.wraps(handler)
        async def checked(pages: Pages, request: web.Request) -> web.StreamResponse:
            check_scope(request[PRINCIPAL], scope)
            return await handler(pages, request)

        checked.needed_scope = scope  # type: ignore[attr-defined]
        return checked

    return wrap


def check_scope(principal: TenantPrincipal, scope: Needed) -> None:
    """Raise Forbidden, which names the scope, if the session does not have it."""
    if scope != "any" and scope not in principal.scopes:
        own = ", ".join(sorted(principal.scopes))
        raise Forbidden(
            f"This page needs the scope '{scope}'. You are logged in with: {own}. Log in with a key that has it; "
            "whoever manages your keys can make one."
        )
