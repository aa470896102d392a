"""Construction of the overview and the search box."""

from typing import Any

from gateway.api.admin.search import AdminSearch
from gateway.components import Billing, Records
from gateway.fleet.history import History
from gateway.pages.frame.filters import money
from gateway.pages.frame.frame import Frame
from gateway.pages.frame.strip import Strip
from gateway.pages.overview.attention import Needs
from gateway.pages.overview.page import Overview
from gateway.pages.overview.search import SearchPage
from gateway.records.activity.report import Activity
from gateway.records.attention import Attention
from gateway.records.search import Search
from gateway.resources import Resources


def build_overview(
    frame: Frame,
    strip: Strip,
    resources: Resources,
    records: Records,
    billing: Billing,
    activity: Activity,
    history: History,
) -> list[Any]:
    """Return the objects of these pages."""
    database, currency = resources.database, resources.settings.currency
    search = Search(database)
    needs = Needs(
        Attention(database, records.tenant_lists),
        billing.ledger,
        lambda micro_units: money(micro_units, currency),
    )
    return [
        Overview(frame=frame, strip=strip, activity=activity, needs=needs, history=history),
        SearchPage(frame, search),
        AdminSearch(search),
    ]
