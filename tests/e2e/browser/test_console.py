"""Every page of the console in light and dark, wide and narrow: no error, no axe violation, no sideways scroll."""

import pytest

from testing.browser import SCHEMES, WIDTHS, faults, person
from tests.gateway.api.test_adapters import files, push

# Pages of a tenant's admin, below /console/. Add each new page here.
CONSOLE_PAGES = (
    *("", "requests", "usage", "usage?by=model", "keys", "keys/new", "audit", "help"),
    *("adapters", "adapters/pirate", "adapters/pirate?tab=use", "adapters/pirate?tab=changes"),
    *("adapters/pirate/confirm?act=delete", "adapters/pirate/alias", "adapter-upload", "playground"),
)
SCOPES = ["inference", "adapters", "usage", "keys"]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_every_page_is_clean(gateway, browser, width, scheme):
    acme = await gateway.tenant("acme", budget_per_month=50_000_000)
    assert (await push(acme, "pirate", files(1))).status == 201
    assert (await acme.complete(model="pirate")).status == 200
    made = await gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": SCOPES, "label": "Ada"})
    found = {}
    async with person(browser, gateway.url, width=width, scheme=scheme) as admin:
        await admin.log_in("/console", made.json["key"])
        for page in CONSOLE_PAGES:
            await admin.open(f"/console/{page}")
            if problems := await faults(admin):
                found[page] = problems
    assert not found, "\n".join(f"{page}: {each}" for page, every in found.items() for each in every)
