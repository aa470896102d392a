"""Every page of the console in light and dark, wide and narrow: no error, no axe violation, no sideways scroll."""

import pytest

from testing.browser import faults_of_pages, person
from tests.gateway.api.test_adapters import files, push

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Pages of a tenant's admin, below /console/. Add each new page here.
CONSOLE_PAGES = (
    *("", "requests", "usage", "usage?by=model", "keys", "keys/new", "audit", "help"),
    *("adapters", "adapters/pirate", "adapters/pirate?tab=use", "adapters/pirate?tab=changes"),
    *("adapters/pirate/confirm?act=delete", "adapters/pirate/alias", "adapter-upload", "playground"),
)
SCOPES = ["inference", "adapters", "usage", "keys"]


async def test_every_page_is_clean(gateway, browser):
    acme = await gateway.tenant("acme", budget_per_month=50_000_000)
    assert (await push(acme, "pirate", files(1))).status == 201
    assert (await acme.complete(model="pirate")).status == 200
    made = await gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": SCOPES, "label": "Ada"})
    async with person(browser, gateway.url) as admin:
        await admin.log_in("/console", made.json["key"])
        found = await faults_of_pages(admin, [f"/console/{page}" for page in CONSOLE_PAGES])
    assert not found, "\n".join(found)
