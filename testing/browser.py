"""A real browser for tests: Debian's Chromium, driven by Playwright, and the checks that every page must pass."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
AXE = Path(__file__).resolve().parent.parent / "tests/e2e/browser/vendor/axe.min.js"
WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")


def can_browse() -> bool:
    """Return whether Chromium and Playwright are installed."""
    return bool(CHROMIUM) and find_spec("playwright") is not None


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """Start the browser. Its sandbox is off, because tests run as root in containers."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


class Person:
    """A browser window of its own, with its cookies. problems: console errors, failed scripts and dialogs so far."""

    def __init__(self, context: Any, page: Any, url: str) -> None:
        self.context, self.page, self.url = context, page, url
        self.problems: list[str] = []
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", self._dismiss)

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    async def _dismiss(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        await dialog.dismiss()

    async def log_in(self, home: str, key: str) -> None:
        """Log in at `/admin` or `/console` with a key."""
        await self.page.goto(f"{self.url}{home}/login")
        await self.page.fill("input[name=key]", key)
        await self.page.click("main button")
        await self.page.wait_for_url(f"{self.url}{home}/")

    async def open(self, path: str) -> None:
        await self.page.goto(self.url + path)

    async def text(self) -> str:
        """Return the visible text of the page."""
        return await self.page.inner_text("body")


@asynccontextmanager
async def person(browser: Any, url: str, *, width: int = 1280, scheme: str = "light") -> AsyncIterator[Person]:
    """Open a window. scheme: "light" or "dark"."""
    context = await browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    # Raised from 5 s: two cores may run several tests.
    context.set_default_timeout(30_000)
    yield Person(context, await context.new_page(), url)
    await context.close()


async def faults(who: Person) -> list[str]:
    """Return what is wrong with the page that is open: errors, sideways scrolling, violations of accessibility."""
    found, who.problems = list(who.problems), []
    width, room = await who.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    if width > room:
        found.append(f"the page is {width} px wide in a window of {room} px")
    # Evaluated by the debugger, which the page's policy does not restrict.
    await who.page.evaluate(AXE.read_text())
    result = await who.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    for violation in result["violations"]:
        nodes = "; ".join(node["html"][:160] for node in violation["nodes"][:3])
        found.append(f"axe {violation['id']}: {nodes}")
    return found
