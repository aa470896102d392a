"""Times of the dashboard's pages in a real browser, over a made-up month: 500 tenants, 2,000 adapters, three engines.

python -m benchmarks.page_walk [FILE.md]

It needs Chromium and Playwright. Each page is opened three times without a limit, for the time of its first paint, and
once in a walk over a slow network (1.6 Mbit/s, 150 ms). Exit code 1: a median first paint took 200 ms or more, or the
walk 10 s or more.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from benchmarks.screenshots import PAGES, month, paths_of
from testing.browser import Person, chromium, person
from testing.gateway.running import ADMIN_KEY

REPEATS = 3
MAX_PAINT_MS, MAX_WALK_S = 200, 10
# An operator's way through the pages of a day, from the log-in.
WALK = ("overview", "tenants", "tenant", "adapters", "adapter", "requests", "refusals", "engines", "usage", "audit")
# Chromium's presets for a fast 3G network, in bytes per second and ms.
SLOW = {"offline": False, "latency": 150, "downloadThroughput": 1_600_000 / 8, "uploadThroughput": 750_000 / 8}
HEAD = """# Times of the dashboard's pages in a browser ({date})

Chromium on the gateway's own machine, over a made-up month: 500 tenants, 2,000 adapters, 60,000 requests, three engines
that are doubles. First paint: first paint with content since the click, in three openings, without a limit of the
network. The slow network has 1.6 Mbit/s and 150 ms of latency.

    python -m benchmarks.page_walk FILE.md
"""
TIMES = """() => {
    const paint = performance.getEntriesByType("paint").find(each => each.name === "first-contentful-paint");
    const [page] = performance.getEntriesByType("navigation");
    if (!paint || !page.loadEventEnd) return null;
    const sizes = [page, ...performance.getEntriesByType("resource")].map(each => each.transferSize);
    return [paint.startTime, page.responseEnd, page.loadEventEnd, sizes.reduce((sum, size) => sum + size, 0)];
}"""


class Times(NamedTuple):
    """Times of a page in ms from the click: first paint with content, end of the answer, end of loading.

    transferred: bytes that were not in the browser's cache.
    """

    paint: float
    answered: float
    loaded: float
    transferred: int


async def opened(who: Person, path: str) -> Times:
    """Open a page and return its times once it has been painted and loaded."""
    await who.open(path)
    # The pages' policy forbids what Playwright's own waiting for a function needs.
    while (times := await who.page.evaluate(TIMES)) is None:
        await who.page.wait_for_timeout(10)
    return Times(*times)


async def paints(who: Person, home: str, key: str, paths: Mapping[str, str]) -> dict[str, list[Times]]:
    """Return the times of each page below `home` on an unlimited network."""
    await who.log_in(home, key)
    mine = {name: path for name, path in paths.items() if path.startswith(home)}
    return {name: [await opened(who, path) for _ in range(REPEATS)] for name, path in mine.items()}


async def walk(who: Person) -> tuple[float, dict[str, Times]]:
    """Return the seconds of the walk over a slow network from an empty cache, and the times of its pages."""
    session = await who.context.new_cdp_session(who.page)
    await session.send("Network.enable")
    await session.send("Network.emulateNetworkConditions", SLOW)
    began = time.perf_counter()
    await who.log_in("/admin", ADMIN_KEY)
    times = {name: await opened(who, PAGES[name]) for name in WALK}
    return time.perf_counter() - began, times


def table(unlimited: dict[str, list[Times]], slow: dict[str, Times]) -> list[str]:
    rows = ["| page | first paint, ms | loaded, ms | slow network: first paint, s | loaded, s | KB |", "|---" * 6 + "|"]
    for name, times in unlimited.items():
        paint = " / ".join(str(round(each.paint)) for each in times)
        loaded = round(statistics.median(each.loaded for each in times))
        row = f"| `{PAGES[name]}` | {paint} | {loaded} |"
        if name in slow:
            one = slow[name]
            row += f" {one.paint / 1000:.2f} | {one.loaded / 1000:.2f} | {one.transferred / 1000:.0f} |"
        else:
            row += " | | |"
        rows.append(row)
    return rows


def verdict(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def summary(unlimited: dict[str, list[Times]], seconds: float) -> tuple[list[str], bool]:
    """Return the table of aims, and whether all are met. A page's first paint is its median."""
    paint = {name: statistics.median(each.paint for each in times) for name, times in unlimited.items()}
    late = [f"`{PAGES[name]}` {ms:.0f}" for name, ms in paint.items() if ms >= MAX_PAINT_MS]
    # The first opening has an empty cache and a script that is not compiled yet.
    first = sum(times[0].paint >= MAX_PAINT_MS for times in unlimited.values())
    ok = (not late, seconds < MAX_WALK_S)
    lines = [
        "| aim | measured | |",
        "|---|---|---|",
        f"| first paint of every page below {MAX_PAINT_MS} ms, median of {REPEATS} | slowest {max(paint.values()):.0f} "
        f"ms; slower pages: {len(late)} of {len(paint)} {', '.join(late)} | {verdict(ok[0])} |",
        f"| the same in the first opening | slower pages: {first} of {len(paint)} | {verdict(not first)} |",
        f"| {len(WALK)} pages over the slow network, from the log-in with an empty cache, below {MAX_WALK_S} s | "
        f"{seconds:.1f} s | {verdict(ok[1])} |",
    ]
    return lines, all(ok)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="Markdown file to write")
    given = parser.parse_args()
    async with month() as (gateway, key, _), chromium() as browser:
        paths, unlimited = await paths_of(gateway), dict[str, list[Times]]()
        for home, secret in (("/admin", ADMIN_KEY), ("/console", key)):
            async with person(browser, gateway.url) as who:
                unlimited |= await paints(who, home, secret, paths)
        async with person(browser, gateway.url) as who:
            seconds, slow = await walk(who)
    aims, is_met = summary(unlimited, seconds)
    lines = [*aims, "", "KB: bytes that the browser's cache did not have.", "", *table(unlimited, slow)]
    print("\n".join(lines))
    if given.file is not None:
        given.file.write_text("\n".join([HEAD.format(date=f"{datetime.now(UTC):%Y-%m-%d}"), *lines, ""]))
    return int(not is_met)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
