"""Frame of every page: navigation by role, status strip, security headers, and the templates' filters."""

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar, Protocol
from urllib.parse import urlencode

import jinja2
from aiohttp import web
from jinja2.bccache import Bucket
from markupsafe import Markup, escape

from gateway.access.roles import ADMIN_PATH, CONSOLE_PATH
from gateway.pages.frame.assets import Assets
from gateway.pages.frame.filters import REVERSING_SHOWN, filters, inert
from gateway.pages.frame.navigation import ROLE_TITLES, TENANTS, groups_for
from gateway.pages.frame.strip import Strip
from gateway.process.page_threads import in_page_thread

log = logging.getLogger(__name__)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# Mark of an answer with a secret, which may be shown once.
SHOWN_ONCE = web.ResponseKey("shown_once", bool)
# Options that compiled templates depend on.
OPTIONS: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
# Folder of compiled templates.
COMPILED = Path(__file__).parents[1] / "templates" / "__pycache__"
THEME_COOKIE = "loraplex_theme"
THEMES = ("light", "dark")


class Viewer(Protocol):
    """Person in front of a page; `gateway/access/sessions.py` has the class."""

    @property
    def subject(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def scopes(self) -> frozenset[str]: ...
    @property
    def csrf(self) -> str: ...


class Compiled(jinja2.FileSystemBytecodeCache):
    """Cache of compiled templates: in memory for all gateways of a process, in files for the next process.

    The files are in `__pycache__` beside the templates, and are written only if Python may write bytecode there. jinja2
    checks each file against its template; the names cover everything else that compilation depends on.
    """

    codes: ClassVar[dict[str, CodeType]] = {}

    def __init__(self) -> None:
        version = hashlib.sha256(f"{jinja2.__version__} {OPTIONS} finalize".encode()).hexdigest()[:12]
        super().__init__(str(COMPILED), f"%s.{sys.implementation.cache_tag}-{version}.pyc")

    def load_bytecode(self, bucket: Bucket) -> None:
        bucket.code = self.codes.get(bucket.key)
        if bucket.code is None:
            try:
                super().load_bytecode(bucket)
            except OSError:
                pass  # there is no file yet
            except Exception:  # a damaged file can raise nearly anything
                log.warning("a compiled template is damaged and is compiled again", exc_info=True)
        if bucket.code is not None:
            self.codes[bucket.key] = bucket.code

    def dump_bytecode(self, bucket: Bucket) -> None:
        if bucket.code is not None:
            self.codes[bucket.key] = bucket.code
        if not sys.dont_write_bytecode and sys.pycache_prefix is None:
            with suppress(OSError):  # the folder may be read-only
                COMPILED.mkdir(exist_ok=True)
                super().dump_bytecode(bucket)


@cache
def environment(asset_url: Callable[[str], str], currency: str) -> jinja2.Environment:
    """Return the templates' environment, which all gateways of a process with this currency share."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("gateway.pages"),
        bytecode_cache=Compiled(),
        auto_reload=False,
        undefined=jinja2.StrictUndefined,
        finalize=inert,
        **OPTIONS,
    )
    made.filters.update(filters(currency))
    made.filters["data"] = as_attribute
    made.globals["asset"] = asset_url
    made.globals["currency"] = currency
    return made


@cache
def _compile(templates: jinja2.Environment) -> None:
    for name in templates.list_templates(extensions=["html"]):
        templates.get_template(name)


class Frame:
    """Renderer of the pages. visitor_of: returns the request's visitor, None on pages without a session.

    currency: the deployment's unit of money. environment_name: the deployment's name for operators; None: no name.
    """

    def __init__(
        self,
        strip: Strip,
        assets: Assets,
        visitor_of: Callable[[web.Request], Viewer | None],
        currency: str,
        environment_name: str | None = None,
    ) -> None:
        self._strip = strip
        self._visitor_of = visitor_of
        self.currency = currency
        self._environment_name = environment_name
        self._environment = environment(assets.url, currency)

    def compile(self) -> None:
        """Compile all templates: a second of CPU, unless an earlier process has done it. Run it in a thread."""
        _compile(self._environment)

    def render(
        self, request: web.Request, template: str, *, title: str, status: int = 200, **context: Any
    ) -> web.Response:
        """Return the page as a response. template: path below `templates/`. context: the template's variables."""
        html = self.html(request, template, title=title, **context)
        return web.Response(text=html, status=status, content_type="text/html", headers=HEADERS)

    def secret(self, request: web.Request, template: str, *, title: str, **context: Any) -> web.Response:
        """Return a page with a new secret, which `form_answers.py` shows once."""
        response = self.render(request, template, title=title, **context)
        response[SHOWN_ONCE] = True
        return response

    async def render_long(
        self, request: web.Request, template: str, *, title: str, status: int = 200, **context: Any
    ) -> web.Response:
        """Return a page with many rows. A thread renders it, because 50 rows take 10 to 20 ms.

        context: values that nothing changes meanwhile.
        """
        found, variables = self._prepare(request, template, title, context)
        html = await in_page_thread(found.render, variables)
        return web.Response(text=html, status=status, content_type="text/html", headers=HEADERS)

    def html(self, request: web.Request, template: str, *, title: str, **context: Any) -> str:
        """Return the page's text."""
        found, variables = self._prepare(request, template, title, context)
        return found.render(variables)

    def _prepare(
        self, request: web.Request, template: str, title: str, context: Mapping[str, Any]
    ) -> tuple[jinja2.Template, dict[str, Any]]:
        """Return the template and its variables, `context` among them."""
        visitor = self._visitor_of(request)
        role = visitor.role if visitor is not None else ""
        is_tenants = role in TENANTS or request.path.startswith(CONSOLE_PATH)
        variables = {
            "title": title,
            "visitor": visitor,
            "csrf": visitor.csrf if visitor is not None else "",
            "role": role,
            "role_title": ROLE_TITLES.get(role, role),
            "is_tenants": is_tenants,
            "root": CONSOLE_PATH if is_tenants else ADMIN_PATH,
            "nav_groups": groups_for(role, visitor.scopes, request) if visitor is not None else [],
            "environment": self._environment_name if visitor is not None and not is_tenants else None,
            "status": self._strip.read(),
            "theme": _theme(request),
            "here": request.path_qs,
            "path": request.path,
            "query": request.query,
            "link": lambda **changes: link(request, **changes),
            "now": datetime.now(UTC),
        }
        return self._environment.get_template(template), {**variables, **context}

    def strip_html(self, *, is_tenants: bool) -> str:
        """Return the strip alone, for live updates. is_tenants: leave out addresses and reasons."""
        template = self._environment.get_template("widgets/strip.html")
        return template.render(status=self._strip.read(), is_tenants=is_tenants, now=datetime.now(UTC))

    def confirm(
        self, request: web.Request, *, title: str, name: str, text: str, button: str, **context: Any
    ) -> web.Response:
        """Return the page that asks the person to type `name` before a destructive act; with "" only to confirm.

        text: what happens. Its form posts to the present URL with the fields `typed` and `csrf`, and with `fields`, a
        mapping, hidden. Other variables: `changes`, rows of (label, old, new); `cancel`, the URL back; `error`; `tone`
        of the button, and the value that it gives to `act`; `again`, (title, value of `act`) of a second button.
        """
        defaults: dict[str, Any] = {"fields": {}, "changes": (), "cancel": None, "error": None, "action": request.path}
        defaults |= {"tone": "danger", "act": None, "again": None}
        status = 400 if context.get("error") else 200
        return self.render(
            request,
            "confirm.html",
            title=title,
            status=status,
            **defaults | {"name": name, "text": text, "button": button} | context,
        )


def link(request: web.Request, **changes: Any) -> str:
    """Return the present URL with other query parameters; None removes one. The number of the page is not kept."""
    query = {key: value for key, value in request.query.items() if key not in ("page", "format")}
    query.update({key: str(value) for key, value in changes.items() if value is not None})
    kept = [(key, value) for key, value in query.items() if value and not (key in changes and changes[key] is None)]
    return f"{request.path}?{urlencode(kept)}" if kept else request.path


def as_attribute(value: Mapping[str, Any] | Sequence[Any]) -> Markup:
    """Return a value as JSON for an attribute in double quotes; every quote and bracket is escaped. Texts are inert."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return escape(text.translate({code: shown.replace("\\", "\\\\") for code, shown in REVERSING_SHOWN.items()}))


def _theme(request: web.Request) -> str:
    theme = request.cookies.get(THEME_COOKIE, "")
    return theme if theme in THEMES else "auto"
