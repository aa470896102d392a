"""Construction of the pages of tenants and keys."""

from typing import Any

from gateway.api.key_manager import KeyManager
from gateway.components import Records
from gateway.fleet.queueing.fairness import Fairness
from gateway.pages.frame.frame import Frame
from gateway.pages.tenants.forms import TenantForms
from gateway.pages.tenants.keys import KeyPages
from gateway.pages.tenants.overview_tab import OverviewTab
from gateway.pages.tenants.page import TenantPage
from gateway.pages.tenants.tenants import TenantPages
from gateway.pages.widgets.examples import KeyExamples
from gateway.quota.quota import Quota
from gateway.records.activity.report import Activity
from gateway.settings import Settings


def build_tenant_pages(
    frame: Frame, records: Records, quota: Quota, activity: Activity, fairness: Fairness, settings: Settings
) -> list[Any]:
    """Return the objects of these pages."""
    currency = settings.currency
    overview_tab = OverviewTab(fairness, activity, records.request_log, records.adapter_list, currency)
    manager = KeyManager(auth=records.auth, keys=records.keys, catalog=records.catalog)
    examples = KeyExamples(records.catalog, records.bases, port=settings.port, admin_port=settings.admin_port)
    return [
        TenantPages(frame, records),
        TenantForms(frame, records, currency),
        TenantPage(frame, records, quota, currency, overview_tab),
        KeyPages(frame, records, manager, examples),
    ]
