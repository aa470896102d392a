"""Pages with tabs; `?tab=` chooses one."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from gateway.errors import BadRequest
from gateway.pages.frame.frame import Frame

# Return the variables of a tab, or a file to save.
TabView = Callable[[web.Request], Awaitable[dict[str, Any] | web.StreamResponse]]


async def show_tab(
    request: web.Request, frame: Frame, template: str, views: Mapping[str, tuple[str, TabView]], **context: Any
) -> web.StreamResponse:
    """Return the page with the chosen tab, or its file. views: the tabs' titles and views by name, the first one first.

    context: `title` and other variables of all tabs. Raises BadRequest for a tab that does not exist.
    """
    here = request.query.get("tab") or next(iter(views))
    if here not in views:
        raise BadRequest(f"tab: expected one of {', '.join(views)}.", param="tab")
    shown = await views[here][1](request)
    if isinstance(shown, web.StreamResponse):
        return shown
    tabs = [(title, f"{request.path}?tab={name}", name == here) for name, (title, _) in views.items()]
    status = 400 if shown.get("errors") else 200
    return frame.render(request, template, status=status, tab=here, tabs=tabs, **{"errors": {}} | context | shown)
