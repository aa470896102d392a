"""Guard of pages: finds the session of a browser's request, checks its role, and refuses forged changes.

A request without a session is redirected to the log-in page, which leads back by `next`. A change (any method but GET
and HEAD) needs the session's CSRF value, in the form field `csrf` or in the header `x-csrf`, and is refused if the
browser's header `Sec-Fetch-Site` names another site.
"""

import hmac
import re
from urllib.parse import parse_qsl, quote, urlsplit

from aiohttp import web
from multidict import MultiDict, MultiDictProxy

from gateway.access.roles import Role, check_role, home_of
from gateway.access.sessions import COOKIE, VISITOR, Sessions, Visitor
from gateway.api.requests.fields import read_raw
from gateway.api.requests.memory import OPERATOR
from gateway.errors import BadRequest, Forbidden, TooLarge

FIELD, HEADER = "csrf", "x-csrf"
READS = ("GET", "HEAD")
# Largest form that is decoded on the event loop, and most fields of it. Larger contents send the header instead.
MAX_FORM_BYTES, MAX_FORM_FIELDS = 64 * 2**10, 1000
MAX_NEXT_CHARS = 2000
FORGED = "This form does not belong to your session. Load the page again and repeat the change."

# Fields of an urlencoded form, on pages.
FORM = web.RequestKey("form", MultiDictProxy)

# No cache may keep answers that depend on a cookie.
NO_STORE = {"Cache-Control": "no-store"}


class PageGuard:
    """Guard of the routes with the scope `page`."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def visitor(self, request: web.Request, least: Role) -> Visitor | web.Response:
        """Return the visitor, also kept under VISITOR, or the answer for a request without a session.

        Raises Forbidden for a role that is too small and for a change without the session's CSRF value, Unavailable.
        """
        home, is_read = home_of(least), request.method in READS
        token = request.cookies.get(COOKIE)
        visitor = None if token is None else await self._sessions.find(token, is_read=is_read)
        # A session of the other group of roles is ignored: its cookie does not belong to this path.
        if visitor is None or visitor.home != home:
            return _without_session(request, home, is_read)
        check_role(visitor.role, least)
        if not is_read:
            await check_form(request, visitor)
        request[VISITOR] = visitor
        return visitor


async def check_form(request: web.Request, visitor: Visitor) -> None:
    """Raise Forbidden for a change that may be forged. Keeps an urlencoded form's fields under FORM."""
    refuse_other_sites(request)
    owner = OPERATOR if visitor.tenant is None else visitor.tenant.id
    given = request.headers.get(HEADER)
    if request.content_type == "application/x-www-form-urlencoded":
        form = request[FORM] = await read_form(request, owner)
        given = given or form.get(FIELD)
    if given is None or not hmac.compare_digest(given.encode("utf-8", "replace"), visitor.csrf.encode()):
        raise Forbidden(FORGED, param=FIELD, code="csrf_mismatch")


def form_of(request: web.Request) -> MultiDictProxy[str]:
    """Return the form of a page's POST. Raises BadRequest for a body of another type."""
    if FORM not in request:
        raise BadRequest("Expected an urlencoded form.")
    return request[FORM]


def refuse_other_sites(request: web.Request) -> None:
    """Raise Forbidden if the browser says that another site made the request."""
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        raise Forbidden(FORGED, param=FIELD, code="csrf_mismatch")


async def read_form(request: web.Request, owner: str = OPERATOR, most: int = MAX_FORM_BYTES) -> MultiDictProxy[str]:
    """Return the fields of an urlencoded form. owner: the user of the memory; most: the form's largest size in bytes.

    Raises BadRequest, TooLarge and what `read_raw` raises.
    """
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise BadRequest("Expected a form that is not compressed.")
    try:
        raw = await read_raw(request, owner, most)
    except web.HTTPRequestEntityTooLarge as error:
        raise TooLarge(f"Expected a form of at most {most} bytes.") from error
    try:
        fields = parse_qsl(raw.decode(), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS, errors="strict")
    except ValueError as error:
        raise BadRequest(f"Expected an urlencoded form in UTF-8 of at most {MAX_FORM_FIELDS} fields.") from error
    return MultiDictProxy(MultiDict(fields))


def safe_next(wanted_path: str | None, home: str) -> str:
    """Return the path to go to after the log-in: `wanted_path` if it is a path below `home`, otherwise `home` itself.

    A URL of another site is never returned, however it is written.
    """
    fallback = f"{home}/"
    if (
        not wanted_path
        or len(wanted_path) > MAX_NEXT_CHARS
        or not re.fullmatch(r"[\x21-\x7e]+", wanted_path)
        or "\\" in wanted_path
    ):
        return fallback
    try:
        parts = urlsplit(wanted_path)
    except ValueError:  # such as "//["
        return fallback
    if parts.scheme or parts.netloc or not (parts.path == home or parts.path.startswith(fallback)):
        return fallback
    # An empty part could begin a host (`//`), and `..` leads out of `home`.
    inner = parts.path.rstrip("/").split("/")[1:]
    if any(part.lower().replace("%2e", ".") in ("", ".", "..") for part in inner):
        return fallback
    return fallback if parts.path.startswith((f"{home}/login", f"{home}/logout")) else wanted_path


def _without_session(request: web.Request, home: str, is_read: bool) -> web.Response:
    """Return the redirect to the log-in page.

    A cookie with SameSite=Strict is missing after a click on another site's link, in an e-mail for example. Such a
    request gets a page that loads the same URL once more, now from this site.
    """
    here = request.rel_url.raw_path_qs
    if request.headers.get("Sec-Fetch-Site") == "cross-site" and is_read and safe_next(here, home) == here:
        return continue_page(here)
    is_htmx = request.headers.get("HX-Request") == "true"
    # A form that was sent has no page of its own: the log-in leads back to the page with the form.
    shown = request.headers.get("HX-Current-URL" if is_htmx else "Referer", "")
    back = here if is_read and not is_htmx else _place_of(shown)
    found = safe_next(back, home)
    where = f"{home}/login" if found == f"{home}/" else f"{home}/login?next={quote(found, safe='/')}"
    if is_htmx:
        # htmx would follow a redirect and put the log-in form into a part of the page.
        return web.Response(status=401, headers={"HX-Redirect": where, **NO_STORE})
    return web.Response(status=303, headers={"Location": where, **NO_STORE})


def _place_of(url: str) -> str:
    """Return path and query of a client's URL; "" for a malformed one."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return f"{parts.path}?{parts.query}" if parts.query else parts.path


def continue_page(where: str) -> web.Response:
    """Return a page that leads to a path of this site at once. where: a path that `safe_next` accepts."""
    url = where.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace("'", "&#39;")
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Loraplex</title>'
        f'<meta http-equiv="refresh" content="0;url={url}"></head><body><a href="{url}">Continue</a></body></html>'
    )
    headers = {
        "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "same-origin",
        **NO_STORE,
    }
    return web.Response(text=text, content_type="text/html", headers=headers)
