"""`/admin/api/webhooks` and `/admin/api/events`: events, and the webhooks and e-mail addresses that receive them."""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from gateway.api.requests.fields import json_response, read_body, read_limit
from gateway.api.scopes import ACTOR
from gateway.api.webhook_manager import NewWebhook, WebhookManager, read_event_filter
from gateway.records.events.events import Event, Events
from gateway.records.webhooks.targets import Webhook, shown_url

DEFAULT_ENTRIES, MAX_ENTRIES = 100, 1000


class ShownWebhook(Struct, frozen=True, kw_only=True):
    """A target of events.

    url: without its path. tenant: name of the tenant whose events it receives; null for those of all. types: null for
    all. failures: failed attempts since the last delivery. error: the last attempt's error; null if it was delivered.
    secret: only in the answer that adds the webhook.
    """

    object: Literal["webhook"] = "webhook"
    name: str
    url: str
    tenant: str | None
    types: Sequence[str] | None
    created_at: datetime
    failures: int
    retry_at: datetime | None
    delivered_at: datetime | None
    error: str | None
    secret: str | UnsetType = UNSET


class WebhookList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ShownWebhook]


class DeletedWebhook(Struct, frozen=True, kw_only=True):
    object: Literal["webhook"] = "webhook"
    name: str
    deleted: bool = True


class WebhookTest(Struct, frozen=True, kw_only=True):
    """Result of a test event. error: why the target did not take it; null if it did."""

    object: Literal["webhook.test"] = "webhook.test"
    name: str
    ok: bool
    error: str | None


class EventPage(Struct, frozen=True, kw_only=True):
    """Page of events. has_more: whether there are older ones."""

    object: Literal["list"] = "list"
    data: list[Event]
    has_more: bool


class AdminWebhooks:
    """Routes for webhooks and events. Answers show a URL without its path, which often holds a secret."""

    def __init__(self, *, manager: WebhookManager, events: Events) -> None:
        self._manager = manager
        self._webhooks = manager.webhooks
        self._events = events

    async def list(self, request: web.Request) -> web.Response:
        found = await self._webhooks.all()
        return json_response(WebhookList(data=[_describe(webhook) for webhook in found]))

    async def get(self, request: web.Request) -> web.Response:
        return json_response(_describe(await self._webhooks.get(request.match_info["name"])))

    async def put(self, request: web.Request) -> web.Response:
        """Add or change a webhook. The answer has the secret of a new one, and no later answer has it."""
        actor, given = request[ACTOR], await read_body(request, NewWebhook)
        webhook, is_new, secret = await self._manager.put(request.match_info["name"], given, actor)
        shown = msgspec.structs.replace(_describe(webhook), secret=UNSET if secret is None else secret)
        return json_response(shown, status=201 if is_new else 200)

    async def delete(self, request: web.Request) -> web.Response:
        actor, name = request[ACTOR], request.match_info["name"]
        await self._webhooks.delete(name, actor)
        return json_response(DeletedWebhook(name=name))

    async def test(self, request: web.Request) -> web.Response:
        """Send a test event at once, and answer with the result."""
        webhook = await self._webhooks.get(request.match_info["name"])
        error = await self._manager.test(webhook)
        return json_response(WebhookTest(name=webhook.name, ok=error is None, error=error))

    async def list_events(self, request: web.Request) -> web.Response:
        limit = read_limit(request, DEFAULT_ENTRIES, MAX_ENTRIES)
        found, has_more = await self._events.list(**read_event_filter(request.query), limit=limit)
        return json_response(EventPage(data=found, has_more=has_more))


def _describe(webhook: Webhook) -> ShownWebhook:
    return ShownWebhook(
        name=webhook.name,
        url=shown_url(webhook.url),
        tenant=webhook.tenant,
        types=webhook.types,
        created_at=webhook.created_at,
        failures=webhook.failures,
        retry_at=webhook.retry_at,
        delivered_at=webhook.delivered_at,
        error=webhook.error,
    )
