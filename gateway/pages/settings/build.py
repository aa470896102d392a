"""Construction of the pages of alerts, settings and the audit log."""

from datetime import timedelta
from typing import Any

from gateway.alerts.build import Alerts
from gateway.api.admin.settings import AdminSettings
from gateway.api.deployment_status import StatusReader
from gateway.api.shown_settings import shown_settings
from gateway.api.webhook_manager import WebhookManager
from gateway.components import Billing, Records
from gateway.pages.frame.frame import Frame
from gateway.pages.settings.alerts import AlertPages
from gateway.pages.settings.audit import AuditPages
from gateway.pages.settings.page import SettingPages
from gateway.records.keys.session_list import SessionLists
from gateway.records.tenants.budgeted import BudgetedTenants
from gateway.records.usage.rejected import RejectedUsage
from gateway.records.webhooks.list import TargetLists
from gateway.resources import Resources


def build_setting_pages(
    frame: Frame, resources: Resources, records: Records, billing: Billing, alerts: Alerts, manager: WebhookManager
) -> list[Any]:
    """Return the objects of the pages, and that of the JSON route of settings."""
    settings, database = resources.settings, resources.database
    status_reader = StatusReader(settings, database, billing.quota.ping)
    shown = shown_settings(settings)
    return [
        AdminSettings(shown=shown, status_reader=status_reader),
        AlertPages(
            frame=frame,
            manager=manager,
            targets=TargetLists(database),
            events=alerts.events,
            tenants=BudgetedTenants(database),
            currency=settings.currency,
        ),
        AuditPages(frame, records.audit),
        SettingPages(
            frame=frame,
            shown=shown,
            status_reader=status_reader,
            keys=records.key_lists,
            sessions=records.sessions,
            session_lists=SessionLists(database, timedelta(seconds=settings.session_idle_seconds)),
            rejected=RejectedUsage(database),
        ),
    ]
