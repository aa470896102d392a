"""Sending of one event to one target, by signed webhook or e-mail."""

import asyncio
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

from gateway.access.peppers import split_peppers
from gateway.alerts.addresses import PublicResolver
from gateway.alerts.mail import Mailer, MailFailed
from gateway.alerts.messages import body, text, title
from gateway.alerts.signing import signed_headers, webhook_secret
from gateway.records.webhooks.targets import Webhook
from wire.http_errors import HTTP_ERRORS

SECONDS = 10.0
# Size limit of an answer's head. The answer's body is not read.
MAX_HEAD_BYTES = 8190


class Sender:
    """Sender of events. mailer: None without a mail server.

    Tenants' webhooks have a session of their own, which connects to public addresses only.
    """

    def __init__(self, pepper: str, mailer: Mailer | None, seconds: float = SECONDS) -> None:
        self._peppers = split_peppers(pepper)
        self._mailer = mailer
        self._seconds = seconds
        self._sessions: dict[bool, ClientSession] = {}

    async def send(
        self, webhook: Webhook, event_id: str, kind: str, tenant: str | None, data: Mapping[str, Any], at: datetime
    ) -> str | None:
        """Send an event. Return None, or why the delivery failed, without any text that the target sent."""
        try:
            async with asyncio.timeout(self._seconds):
                if webhook.is_mail:
                    return await self._mail(webhook, event_id, kind, tenant, data, at)
                return await self._post(webhook, event_id, body(event_id, kind, tenant, data, at))
        except TimeoutError:
            return f"no answer within {self._seconds:g} s"

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()
        if self._mailer is not None:
            self._mailer.close()

    async def _post(self, webhook: Webhook, event_id: str, content: bytes) -> str | None:
        # During a rotation the target may have either secret.
        secrets = [webhook_secret(pepper, webhook.id) for pepper in self._peppers]
        headers = signed_headers(secrets, event_id, int(time.time()), content)
        headers["Content-Type"] = "application/json"
        session = self._session(is_tenants=webhook.tenant is not None)
        try:
            # A redirect could lead to a private address, or without TLS.
            async with session.post(webhook.url, data=content, headers=headers, allow_redirects=False) as answer:
                answer.close()
                return None if 200 <= answer.status < 300 else f"the target answered {answer.status}"
        except TimeoutError:
            raise
        except (*HTTP_ERRORS, ValueError) as error:
            return f"the target cannot be reached: {type(error).__name__}"

    async def _mail(
        self, webhook: Webhook, event_id: str, kind: str, tenant: str | None, data: Mapping[str, Any], at: datetime
    ) -> str | None:
        if self._mailer is None:
            return "LORAPLEX_SMTP_URL is not set"
        try:
            to, line = webhook.url.removeprefix("mailto:"), f"[Loraplex] {title(kind, tenant, data)}"
            await self._mailer.send(to, event_id, line, text(kind, tenant, data, at))
        except MailFailed as error:
            return str(error)
        return None

    def _session(self, *, is_tenants: bool) -> ClientSession:
        if is_tenants not in self._sessions:
            resolver = PublicResolver() if is_tenants else None
            self._sessions[is_tenants] = ClientSession(
                connector=TCPConnector(limit=0, resolver=resolver, force_close=True),
                timeout=ClientTimeout(total=self._seconds),
                cookie_jar=DummyCookieJar(),
                headers={"User-Agent": "Loraplex"},
                max_line_size=MAX_HEAD_BYTES,
                max_field_size=MAX_HEAD_BYTES,
            )
        return self._sessions[is_tenants]
