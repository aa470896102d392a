"""Search box of the pages: a text with a single match redirects to its page, any other text to a list of matches.

The box is a form with POST, because people paste whole keys, which must not be in a URL.
"""

from urllib.parse import quote

from aiohttp import web

from gateway.api.admin.search import clean, is_request
from gateway.api.page_guard import FORM
from gateway.pages.frame.frame import Frame
from gateway.pages.widgets.links import Links
from gateway.records.search import Found, Search

SEARCH = "/admin/search"


class SearchPage:
    """Routes of the search box."""

    def __init__(self, frame: Frame, search: Search) -> None:
        self._frame = frame
        self._search = search

    async def submit(self, request: web.Request) -> web.StreamResponse:
        """Redirect to the page for the form's text. A whole key is first cut to its id."""
        form = request.get(FORM)
        text = clean("" if form is None else str(form.get("q", "")))
        if is_request(text):
            raise web.HTTPSeeOther(Links(request).request(text))
        raise web.HTTPSeeOther(f"{SEARCH}?q={quote(text)}")

    async def results(self, request: web.Request) -> web.StreamResponse:
        """Return the matches, or redirect to the only one."""
        text, links = clean(request.query.get("q", "")), Links(request)
        found = await self._search.find(text) if text else Found(tenants=[], versions=[], keys=[])
        if (only := _only(found, text, links)) is not None:
            raise web.HTTPSeeOther(only)
        return self._frame.render(request, "search.html", title="Search", text=text, found=found, links=links)


def _only(matches: Found, text: str, links: Links) -> str | None:
    """Return the page of the only match, or of the tenant of that name."""
    if matches.tenants == [text]:
        return links.tenant(text)
    if matches.number != 1:
        return None
    if matches.tenants:
        return links.tenant(matches.tenants[0])
    if matches.versions:
        return links.adapter(matches.versions[0].tenant, matches.versions[0].name)
    return links.key(matches.keys[0].id)
