"""Records for tests of pages, an application around handlers, a parser that finds scripts, and forms of pages."""

import html
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from html.parser import HTMLParser
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.access.auth import BOOTSTRAP_KEY_ID, Authenticator
from gateway.api.access_log import REQUEST_ID
from gateway.api.inference.delivery import DELIVERIES, Deliveries
from gateway.api.scopes import ACTOR, AUTH
from gateway.billing.writer import UsageWriter
from gateway.error_boundary import error_boundary
from gateway.errors import Exceeded
from gateway.metrics import Metrics
from gateway.records.caches.changes import Changes
from gateway.records.keys.keys import Keys
from gateway.records.requests.refused import RefusalLog, RefusedRequest
from gateway.records.sql.database import Database
from testing.gateway.rows import NOON
from testing.gateway.running import PEPPER, Answer, Browser
from tests.gateway.pages.conftest import Reader

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


def refused(number: int, **changes: Any) -> RefusedRequest:
    values: dict[str, Any] = {
        "request_id": f"req_r{number:02}",
        "at": NOON + timedelta(minutes=number, seconds=30),
        "tenant_id": "t1",
        "tenant": "acme",
        "key_id": "k",
        "method": "POST",
        "route": "/v1/chat/completions",
        "status": 429,
        "code": "rate_limit_exceeded",
        "latency_ms": 1,
        "model": "pirate",
        "exceeded": Exceeded(
            name="tokens_per_minute", owner="tenant", value=20_000, needed=4_096, remaining=310, retry_after=12
        ),
    }
    return RefusedRequest(**values | changes)


async def fill(database: Database, *rows: Any) -> None:
    """Write refused requests and usage rows."""
    log = RefusalLog(database, lambda _: None)
    for each in rows:
        if isinstance(each, RefusedRequest):
            log.note(each)
    await log.flush()
    await UsageWriter(database).write(each for each in rows if not isinstance(each, RefusedRequest))


class Tags(HTMLParser):
    """Parser that keeps the tags that could run a script."""

    def __init__(self) -> None:
        super().__init__()
        self.unsafe: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        runs = any(name.startswith("on") or (value or "").strip().startswith("javascript:") for name, value in attrs)
        if runs or tag == "img" or (tag == "script" and not (given.get("src") or "").startswith("/static/")):
            self.unsafe.append(self.get_starttag_text() or tag)


@web.middleware
async def named(request: web.Request, handler: Any) -> web.StreamResponse:
    request[REQUEST_ID], request[ACTOR] = "req_page", BOOTSTRAP_KEY_ID
    return await handler(request)


@asynccontextmanager
async def serving(handlers: Mapping[str, Any]) -> AsyncIterator[Reader]:
    """Serve handlers of GET by their paths, behind the middleware that makes errors into answers."""
    app = web.Application(middlewares=[named, error_boundary])
    app[DELIVERIES] = Deliveries(Metrics(), reader_bytes=2**20, total_bytes=2**25, min_read_rate=1024.0, window=60.0)
    # No key can become invalid, so the authenticator asks no database.
    nothing: Any = None
    app[AUTH] = Authenticator(Keys(nothing), PEPPER, None, Changes(nothing))
    for path, handler in handlers.items():
        app.router.add_get(path, handler)
    server = TestServer(app)
    await server.start_server()
    async with aiohttp.ClientSession() as session:
        yield Reader(session, str(server.make_url("")).rstrip("/"))
    await server.close()


def unsafe(text: str) -> list[str]:
    """Return the tags of a page that could run a script which is not its own."""
    tags = Tags()
    tags.feed(text)
    return tags.unsafe


def fields(answer: Answer) -> dict[str, str]:
    """Return the fields of the page's form as a browser sends them."""
    page = answer.body.decode().split("<main")[1]
    found = {}
    for tag in re.findall(r"<input\b[^>]*>", page):
        given = dict(re.findall(r'(\w+)="([^"]*)"', tag))
        if given.get("type") != "checkbox" or " checked" in tag:
            found[given.get("name", "")] = html.unescape(given.get("value", ""))
    for name, value in re.findall(r'<textarea\b[^>]*name="(\w+)"[^>]*>(.*?)</textarea>', page, re.DOTALL):
        found[name] = html.unescape(value).replace("\n", "\r\n")
    for name, options in re.findall(r'<select\b[^>]*name="(\w+)"[^>]*>(.*?)</select>', page, re.DOTALL):
        chosen = re.search(r'value="([^"]*)" selected', options) or re.search(r'value="([^"]*)"', options)
        found[name] = html.unescape(chosen[1]) if chosen else ""
    return found


async def send(browser: Browser, path: str, form: dict[str, str]) -> Answer:
    return await browser.submit(path, **{name: value for name, value in form.items() if name != "csrf"})
