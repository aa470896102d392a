"""Frame of the pages: headers, navigation by role, the status strip, themes, escaping and files."""

import html
import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.api.health import State
from gateway.api.requests.fields import REVERSING
from gateway.fleet.engines.health import Health
from gateway.pages.frame import frame
from gateway.pages.frame.frame import as_attribute

SINCE = datetime(2026, 11, 1, 4, 53, 47, tzinfo=UTC)
# Values of hidden fields that have no text of other people, so the filter `typed` is not needed.
MADE_HERE = {"csrf", "once", "shown", "name", "group", "one.version", "alias.etag"}
MADE_HERE |= {"span.since.isoformat()", "span.until.isoformat()"}
HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


async def test_a_page_allows_no_script_but_its_own(reader):
    response, text = await reader.get("/admin/")
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cache-Control"] == "no-store"
    # Inline scripts, styles and handlers would be blocked, so there are none.
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=", text)


async def test_the_navigation_has_the_pages_of_the_role(reader, site):
    _, text = await reader.get("/admin/")
    assert '<a href="/admin/" aria-current="page">' in text
    assert '<a href="/admin/engines">' in text
    # This gateway has no such page.
    assert "/admin/tenants" not in text
    assert "/console/" not in text
    site.world.visitor = site.world.person("tenant_member")
    _, text = await reader.get("/console/")
    assert '<a href="/console/" aria-current="page">' in text
    assert "/admin/" not in text


async def test_hostile_names_are_inert(reader, site):
    site.world.visitor = site.world.person("operator", HOSTILE)
    site.context["message"] = HOSTILE
    site.world.engine(f"http://{HOSTILE}")
    _, text = await reader.get("/admin/")
    assert "<img" not in text
    assert "alert(1)</script>" not in text
    assert as_attribute({"name": HOSTILE}).count("<") == 0
    assert '"' not in as_attribute({"name": HOSTILE})


@pytest.mark.parametrize("world", ["<b>staging", None], indirect=True)
async def test_operators_see_the_environment_on_every_page(reader, site, request):
    is_named = request.node.callspec.params["world"] is not None
    _, text = await reader.get("/admin/")
    title = "Test · &lt;b&gt;staging · Loraplex" if is_named else "Test · Loraplex"
    assert f"<title>{title}</title>" in text
    header = text[text.index("<header") : text.index("</header>")]
    assert ('<span class="sr">Environment: </span>&lt;b&gt;staging</span>' in header) is is_named
    assert ("Environment" in header, "<b>staging" in text) == (is_named, False)
    for visitor in (site.world.person("tenant_member"), None):
        site.world.visitor = visitor
        _, text = await reader.get("/console/")
        assert "staging" not in text


async def test_characters_that_reverse_text_are_shown_as_escapes(reader, site):
    stored, shown = "pho\u202ene \u05d0\u2067", "pho\\u202ene \u05d0\\u2067"
    site.context["message"] = stored
    _, text = await reader.get("/admin/")
    assert shown in text
    assert not REVERSING & set(text)
    attribute = str(as_attribute({"name": stored}))
    assert not REVERSING & set(attribute)
    assert json.loads(html.unescape(attribute)) == {"name": shown}


def test_hidden_fields_send_back_what_they_were_given():
    found = set()
    for path in Path(frame.__file__).parent.parent.glob("templates/**/*.html"):
        for value in re.findall(r'<input type="hidden"[^>]* value="{{ (.*?) }}">', path.read_text()):
            found.add("typed" if value.endswith(" | typed") else value)
    assert found == {"typed", *MADE_HERE}


async def test_the_strip_names_each_fault_with_its_beginning(reader, site):
    world = site.world
    up, broken, down = (world.engine(f"http://engine-{i}:8100") for i in (1, 2, 3))
    _, text = await reader.get("/admin/")
    assert "All parts work" in text
    assert "3/3 engines up" in text
    world.states["database"] = State("unavailable", SINCE)
    for _ in range(3):
        broken.breaker.failed(broken.breaker.sent("a"))
        broken.breaker.failed(broken.breaker.sent("b"))
    down.mark_down("connection refused")
    _, text = await reader.get("/admin/")
    assert "Database is faulty" in text
    assert 'title="2026-11-01 04:53:47 UTC"' in text
    assert "1/3 engines up" in text
    assert re.search(r"breaker open until <time[^>]*>\d\d:\d\d:\d\d</time>", text)
    assert "connection refused" in text
    assert up.is_up


async def test_a_draining_engine_is_no_outage(world):
    world.engine("http://a:1")
    world.engine("http://b:1").mark_down("it finishes its requests and stops", Health.DRAINING)
    status = world.strip.read()
    assert (status.level, status.summary) == ("warn", "1 of 2 engines serve requests")
    assert [engine.state for engine in status.engines] == ["up", "draining"]


async def test_a_tenant_sees_no_address_and_no_reason(reader, site):
    site.world.engine("http://secret-host:8100").mark_down("connection refused")
    site.world.states["database"] = State("unavailable", SINCE)
    site.world.visitor = site.world.person("tenant_admin")
    _, text = await reader.get("/console/")
    assert "The service has a fault" in text
    assert "secret-host" not in text
    assert "Database" not in text


async def test_the_theme_comes_from_the_cookie(reader):
    for cookie, shown in (
        ("dark", 'data-theme="dark"'),
        ("light", 'data-theme="light"'),
        ('"><b>', '<html lang="en">'),
    ):
        _, text = await reader.get("/admin/", cookies={"loraplex_theme": cookie})
        assert shown in text.split("<head>")[0]


async def test_files_are_kept_for_ever_under_the_hash_of_their_content(reader, world):
    url = world.assets.url("app.css")
    response, text = await reader.get(url)
    assert response.status == 200
    assert "immutable" in response.headers["Cache-Control"]
    assert "--accent" in text
    again, _ = await reader.get(url, headers={"If-None-Match": response.headers["ETag"]})
    assert again.status == 304
    # A gateway of another release made this URL.
    other, _ = await reader.get("/static/0123456789ab/app.css")
    assert (other.status, other.headers["Cache-Control"]) == (200, "public, no-cache")
    for missing in ("/static/x/../frame.py", "/static/x/vendor/htmx.LICENSE", "/static/x/%2e%2e/frame.py"):
        assert (await reader.get(missing))[0].status == 404
