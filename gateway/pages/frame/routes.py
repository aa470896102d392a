"""Routes of the pages' files and of their live updates."""

from functools import partial

from gateway.access.roles import ADMIN_PATH, CONSOLE_PATH
from gateway.api.route import Route
from gateway.pages.frame.assets import Assets
from gateway.pages.frame.form_answers import FormAnswers
from gateway.pages.frame.live import Live

_page = partial(Route, "GET", scope="page", query=(), response=None)

FRAME_PAGES: dict[type, tuple[Route, ...]] = {
    FormAnswers: tuple(
        _page(f"{home}/answers/{{id}}", FormAnswers.show, "Return the answer to a form.", query=("form",))
        for home in (ADMIN_PATH, CONSOLE_PATH)
    ),
    Live: (
        _page("/admin/events", Live.admin, "Stream the status strip to an operator's page."),
        _page("/console/events", Live.console, "Stream the status strip to a tenant's page."),
    ),
    Assets: (
        Route(
            "GET",
            "/static/{version}/{name:.+}",
            Assets.get,
            "Return a style, script or font of the pages.",
            is_open=True,
            response=None,
        ),
    ),
}
