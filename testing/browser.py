"""A real browser for tests: Debian's Chromium, driven by Playwright, and the checks that every page must pass."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
AXE = Path(__file__).resolve().parent.parent / "tests/e2e/browser/vendor/axe.min.js"
# Script of `Person.checker`. axe is hidden from that window, and so uses the window of the elements that it checks.
CHECKER = """source => {
    const own = {getComputedStyle() {}};
    Function("window", source).call(own);
    // axe's own reports take longer: they describe the passed elements too.
    own.axe.addReporter("violations", (results, _, done) => done(
        results.filter(({violations}) => violations.length).map(({id, violations}) =>
            [id, violations.slice(0, 3).map(({node}) => node.source.slice(0, 160)).join("; ")])));
    // Only one rule needs preloaded style sheets, and it is off by default.
    const options = {reporter: "violations", preload: false};
    window.violations = more => own.axe.run(opener.document.documentElement, {...options, ...more});
}"""
# Widths and colour schemes in which pages are checked. Neighbours differ by one of the two, as each change takes time.
VIEWS = ((390, "light"), (390, "dark"), (1280, "dark"), (1280, "light"))
CONTRAST = {"runOnly": ["color-contrast"]}
# Longest wait for a state of a page. Playwright's own 5 s are too short where two cores run several tests.
PATIENCE_MS = 60_000


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


def expect(actual: Any) -> Any:
    """Return Playwright's assertions about a locator or a page, which poll until they hold or PATIENCE_MS have passed.

    A read by `count`, `inner_text` or `evaluate` does not wait for the page that a click opens.
    """
    from playwright.async_api import expect

    expect.set_options(timeout=PATIENCE_MS)
    return expect(actual)


class Person:
    """A browser window of its own, with its cookies. problems: console errors, failed scripts and dialogs so far."""

    def __init__(self, context: Any, page: Any, url: str, width: int, scheme: str) -> None:
        self.context, self.page, self.url = context, page, url
        self.width, self.scheme = width, scheme
        self.problems: list[str] = []
        self._checker: Any = None
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

    async def delay(self, pattern: str) -> asyncio.Event:
        """Hold requests for a URL pattern until the returned event is set."""
        may_load = asyncio.Event()

        async def held(route: Any) -> None:
            await may_load.wait()
            await route.continue_()

        await self.context.route(pattern, held)
        return may_load

    async def checker(self) -> Any:
        """Return a blank window that runs axe on this one, so that axe is compiled and optimised once for all pages."""
        if self._checker is None:
            async with self.page.expect_popup() as popup:
                await self.page.evaluate("() => { open() }")
            self._checker = await popup.value
            # Evaluated by the debugger, which the page's policy does not restrict.
            await self._checker.evaluate(CHECKER, AXE.read_text())
        return self._checker

    async def open(self, path: str) -> None:
        await self.page.goto(self.url + path)

    async def text(self) -> str:
        """Return the visible text of the page, once it is loaded."""
        await self.page.wait_for_load_state()
        return await self.page.inner_text("body")

    async def sees(self, text: str, where: str = "body") -> None:
        """Wait until the element shows the text. Unlike `text`, it waits for the page that a click opens."""
        await expect(self.page.locator(where)).to_contain_text(text, use_inner_text=True)

    async def find(self, path: str, selector: str) -> None:
        """Open a page, and again until it shows the element: the ledger and the engines' reports follow later."""
        deadline = time.monotonic() + PATIENCE_MS / 1000
        await self.open(path)
        while not await self.page.locator(selector).count():
            assert time.monotonic() < deadline, f"{path} never showed {selector}: {await self.text()}"
            await self.page.wait_for_timeout(50)
            await self.open(path)


@asynccontextmanager
async def person(
    browser: Any, url: str, *, width: int = 1280, scheme: str = "light", is_painted: bool = True
) -> AsyncIterator[Person]:
    """Open a window. scheme: "light" or "dark". is_painted: whether no other window covers it; painting takes CPU time.

    Nothing moves in it: a transition or an animation is painted again and again.
    """
    context = await browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE_MS)
    try:
        page = await context.new_page()
        if not is_painted:
            await context.new_page()
        yield Person(context, page, url, width, scheme)
    finally:
        await context.close()


async def faults(who: Person) -> list[str]:
    """Return the faults of the open page: errors, horizontal scrolling, violations of accessibility rules."""
    found, who.problems = list(who.problems), []
    found += await _sideways(who) + await _violations(who, {})
    await who.page.bring_to_front()
    return found


async def faults_of_pages(who: Person, paths: Iterable[str]) -> list[str]:
    """Open each page once and return its faults at both widths and in both colour schemes."""
    found = []
    for path in paths:
        # The narrow window comes first: layout left over from the wide one could hide that the page is too wide.
        await _show(who, *VIEWS[0])
        await who.open(path)
        found += [path + each for each in await faults_in_all_views(who)]
    await who.page.bring_to_front()
    return found


async def faults_in_all_views(who: Person) -> list[str]:
    """Return the faults of the open page at both widths and in both colour schemes, without loading it again.

    The other scheme changes colours only, so only the contrast rule runs there.
    """
    seen, who.problems = [f": {each}" for each in who.problems], []
    for width, scheme in VIEWS:
        await _show(who, width, scheme)
        here = await _violations(who, CONTRAST if scheme == "dark" else {})
        here += await _sideways(who) if scheme == "light" else []
        seen += [f" ({width} px, {scheme}): {each}" for each in here]
    seen += [f": {each}" for each in who.problems]
    who.problems = []
    return seen


async def _show(who: Person, width: int, scheme: str) -> None:
    """Change the window's width and colour scheme, if they differ from the last ones."""
    if width != who.width:
        await who.page.set_viewport_size({"width": width, "height": 900})
    if scheme != who.scheme:
        # During a transition between two schemes, a colour has the contrast of neither.
        await who.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    who.width, who.scheme = width, scheme


async def _sideways(who: Person) -> list[str]:
    width, room = await who.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    return [f"the page is {width} px wide in a window of {room} px"] if width > room else []


async def _violations(who: Person, rules: dict[str, Any]) -> list[str]:
    """Return the violations of accessibility by axe. rules: axe's options that select rules."""
    found = await (await who.checker()).evaluate("violations", rules)
    return [f"axe {rule}: {nodes}" for rule, nodes in found]
