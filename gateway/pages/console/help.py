"""`/console/help`: docs/using-your-key.md with the service's address and the tenant's own names."""

import itertools
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources

from aiohttp import web
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from gateway.api.scopes import PRINCIPAL
from gateway.pages.console.access import Console, ConsolePages, needs
from gateway.pages.widgets.examples import example_models, origin
from gateway.records.version_state import READY

# In the repository a symbolic link to docs/using-your-key.md, in a wheel a copy.
SOURCE = "using-your-key.md"
EXAMPLE_ORIGIN = "https://api.example.com"
INTRODUCTION = re.compile(r"\A# .*?(?=^## )", re.MULTILINE | re.DOTALL)
TABLE = '<div class="table-box" tabindex="0" role="region" aria-label="Table {}"><table class="data">'
SECTION = re.compile(r"<h2>(.*?)</h2>")


class ConsoleHelp(ConsolePages):
    """Page that explains the use of a key. Its text is rendered once; a request only fills in its tenant's names."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        text = resources.files("gateway.pages").joinpath("templates", "console", SOURCE).read_text("utf-8")
        self._html, self._sections = render(text)

    @needs("any")
    async def show(self, request: web.Request) -> web.StreamResponse:
        principal = request[PRINCIPAL]
        async with self.console.reads.place(principal.tenant.id):
            adapters = await self.console.records.catalog.list(principal.tenant)
        names = [each.name for each in adapters if each.state == READY and principal.may_use(each.name)]
        return self.console.frame.render(
            request,
            "console/help.html",
            title="How to use your key",
            content=fill_names(self._html, origin(request), names),
            sections=self._sections,
            models=example_models(names, principal, self.console.base_names),
            base_model=self.console.base_model(principal),
            principal=principal,
        )


@cache
def render(text: str) -> tuple[Markup, list[tuple[Markup, str]]]:
    """Return the Markdown text without its introduction as HTML, and (title, link) of each section."""
    # HTML in the source is escaped.
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(INTRODUCTION.sub("", text))
    sections: list[tuple[Markup, str]] = []

    def with_anchor(match: re.Match[str]) -> str:
        anchor = re.sub(r"\W+", "-", match[1].lower()).strip("-")
        sections.append((Markup(match[1]), f"#{anchor}"))
        return f'<h2 id="{anchor}">{match[1]}</h2>'

    html = SECTION.sub(with_anchor, html)
    numbers = itertools.count(1)
    html = re.sub("<table>", lambda _: TABLE.format(next(numbers)), html)
    return Markup(html.replace("</table>", "</table></div>").replace("<pre>", '<pre tabindex="0">')), sections


def fill_names(html: Markup, address: str, adapters: Sequence[str]) -> Markup:
    """Return the HTML with the service's address, and with the first adapters in place of its examples."""
    text = str(html).replace(EXAMPLE_ORIGIN, str(escape(address)))
    if adapters:
        first, second = (str(escape(adapters[i])) for i in (0, min(1, len(adapters) - 1)))
        text = text.replace("json*0.3", f"{second}*0.3")
        text = re.sub(r"\bpirate\b", lambda _: first, text)
    return Markup(text)
