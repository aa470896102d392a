"""Construction of the pages of tenants, keys, plans, prices and the audit log."""

from typing import Any

from gateway.api.key_desk import KeyDesk
from gateway.pages.audit import AuditPages
from gateway.pages.frame import Frame
from gateway.pages.keys import KeyPages
from gateway.pages.plans import PlanPages
from gateway.pages.prices import PricePages
from gateway.pages.tenant_page import TenantPage
from gateway.pages.tenants import TenantPages
from gateway.parts import Records
from gateway.quota.quota import Quota


def build_record_pages(frame: Frame, records: Records, quota: Quota, currency: str) -> list[Any]:
    """Return the objects of these pages. currency: of budgets and prices."""
    desk = KeyDesk(auth=records.auth, keys=records.keys, catalog=records.catalog)
    return [
        TenantPages(frame, records, currency),
        TenantPage(frame, records, quota, currency),
        KeyPages(frame, records, desk),
        PlanPages(frame, records, currency),
        PricePages(frame, records),
        AuditPages(frame, records.audit),
    ]
