"""`/console/help`: docs/using-your-key.md with the service's address and the tenant's own names."""

import itertools
import re
from importlib import resources

from aiohttp import web
from markdown_it import MarkdownIt
from markupsafe import Markup

from gateway.access.scopes import PRINCIPAL
from gateway.pages.console.access import Console, ConsolePages, needs
from gateway.pages.console.places import example_models, origin
from gateway.records.adapters.rows import READY

# A copy of docs/using-your-key.md, which an installed wheel does not have; a test holds them equal.
SOURCE = "using-your-key.md"
EXAMPLE_ORIGIN = "https://api.example.com"
INTRODUCTION = re.compile(r"\A# .*?(?=^## )", re.MULTILINE | re.DOTALL)
TABLE = '<div class="table-box" tabindex="0" role="region" aria-label="Table {}"><table class="data">'
SECTION = re.compile(r"<h2>(.*?)</h2>")


class ConsoleHelp(ConsolePages):
    """Page that explains the use of a key."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        text = resources.files("gateway.pages").joinpath("templates", "console", SOURCE).read_text("utf-8")
        self._source = INTRODUCTION.sub("", text)
        # Neither HTML of the source nor of a name is passed through.
        self._markdown = MarkdownIt("commonmark", {"html": False}).enable("table")

    @needs("any")
    async def show(self, request: web.Request) -> web.StreamResponse:
        principal = request[PRINCIPAL]
        async with self.console.reads.turn(principal.tenant.id):
            adapters = await self.console.records.catalog.list(principal.tenant)
        names = [each.name for each in adapters if each.state == READY and principal.may_use(each.name)]
        html = self._markdown.render(fill_names(self._source, origin(request), names))
        titles: list[tuple[str, str]] = []

        def with_anchor(match: re.Match[str]) -> str:
            anchor = re.sub(r"\W+", "-", match[1].lower()).strip("-")
            titles.append((match[1], f"#{anchor}"))
            return f'<h2 id="{anchor}">{match[1]}</h2>'

        html = SECTION.sub(with_anchor, html)
        numbers = itertools.count(1)
        html = re.sub("<table>", lambda _: TABLE.format(next(numbers)), html)
        html = html.replace("</table>", "</table></div>").replace("<pre>", '<pre tabindex="0">')
        return self.console.frame.render(
            request,
            "console/help.html",
            title="How to use your key",
            # The text is the release's own, and its renderer escapes the names.
            content=Markup(html),
            sections=[(Markup(title), anchor) for title, anchor in titles],
            models=example_models(names, principal, self.console.base_model),
            base_model=self.console.base_model,
            principal=principal,
        )


def fill_names(source: str, address: str, adapters: list[str]) -> str:
    """Return the text with the service's address, and with the first adapters in place of its examples."""
    text = source.replace(EXAMPLE_ORIGIN, address)
    if adapters:
        text = text.replace("json*0.3", f"{adapters[1] if len(adapters) > 1 else adapters[0]}*0.3")
        text = re.sub(r"\bpirate\b", lambda _: adapters[0], text)
    return text
