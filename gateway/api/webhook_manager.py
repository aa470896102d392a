"""Changes of webhooks and filters of events, for the admin API and the page of alerts."""

import uuid
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

from msgspec import Meta, Struct

from gateway.access.peppers import split_peppers
from gateway.alerts.addresses import MAX_URL_CHARS, check_url
from gateway.alerts.sending import Sender
from gateway.alerts.signing import webhook_secret
from gateway.api.requests.fields import parse_period, parse_text
from gateway.errors import BadRequest
from gateway.records.events.events import EVENT_TYPES
from gateway.records.events.types import EventType
from gateway.records.tenants.tenants import Tenants
from gateway.records.webhooks.targets import Webhook, Webhooks


class NewWebhook(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body for a webhook. types: the events to send; null for all. tenant: send only this tenant's events."""

    url: Annotated[str, Meta(min_length=1, max_length=MAX_URL_CHARS)]
    types: Annotated[list[EventType], Meta(min_length=1, max_length=20)] | None = None
    tenant: str | None = None


class WebhookManager:
    """Adds, changes and tries webhooks. http_hosts: hosts that operators' webhooks may reach without TLS."""

    def __init__(
        self,
        *,
        webhooks: Webhooks,
        tenants: Tenants,
        sender: Sender,
        pepper: str,
        http_hosts: Collection[str],
        has_mail: bool,
    ) -> None:
        self.webhooks = webhooks
        self.has_mail = has_mail
        self._tenants = tenants
        self._sender = sender
        self._pepper = pepper
        self._http_hosts = http_hosts

    async def put(
        self, name: str, fields: NewWebhook, actor: str, *, seen: Webhook | None = None
    ) -> tuple[Webhook, bool, str | None]:
        """Add or change a webhook. Return it, whether it is new, and a new one's secret, which is not shown again.

        An e-mail address has no secret. seen: the webhook on which the change is based. Raises BadRequest,
        RecordNotFound for an unknown tenant, Changed.
        """
        tenant = None if fields.tenant is None else await self._tenants.get(fields.tenant)
        check_url(fields.url, self._http_hosts, has_mail=self.has_mail, is_tenants=tenant is not None)
        types = None if fields.types is None else sorted(set(fields.types))
        webhook, is_new = await self.webhooks.put(name, fields.url, types, tenant, actor, seen=seen)
        secret = webhook_secret(split_peppers(self._pepper)[0], webhook.id) if is_new and not webhook.is_mail else None
        return webhook, is_new, secret

    async def test(self, webhook: Webhook) -> str | None:
        """Send a test event now. Return the reason if the target did not take it, None if it did."""
        now, data = datetime.now(UTC), {"webhook": webhook.name}
        return await self._sender.send(webhook, uuid.uuid4().hex, "test", webhook.tenant, data, now)


def read_event_filter(query: Mapping[str, str]) -> dict[str, Any]:
    """Return the filter of a query, as `Events.list` takes it. Raises BadRequest."""
    since, until = parse_period(query)
    kind = query.get("type")
    if kind is not None and kind not in {*EVENT_TYPES, *(each.partition(".")[0] for each in EVENT_TYPES)}:
        raise BadRequest(f"type: expected one of {', '.join(EVENT_TYPES)}, or its first word.", param="type")
    texts = {name: parse_text(query, name) for name in ("tenant", "after")}
    return {**texts, "kind": kind, "since": since, "until": until}
