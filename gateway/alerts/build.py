"""Construction of the watch of events and of their delivery."""

from dataclasses import dataclass

from gateway.alerts.budgets import Budgets
from gateway.alerts.fleet_events import FleetEvents
from gateway.alerts.mail import Mailer
from gateway.alerts.outbox import Outbox
from gateway.alerts.sending import Sender
from gateway.alerts.watch import Watch
from gateway.components import Records, Serving
from gateway.records.events.events import Events
from gateway.records.maintenance.leadership import Leadership
from gateway.records.money.spending import Spending
from gateway.records.tenants.budgeted import BudgetedTenants
from gateway.records.webhooks.targets import Webhooks
from gateway.resources import Resources

# Lifetimes of the leaders' leases: another process takes over from one that died after this time.
OUTBOX_SECONDS, WATCH_SECONDS = 20.0, 60.0


@dataclass(frozen=True, slots=True)
class Alerts:
    """Events, their targets, and the tasks that watch and deliver."""

    events: Events
    webhooks: Webhooks
    sender: Sender
    outbox: Outbox
    watch: Watch


def build_alerts(resources: Resources, records: Records, serving: Serving) -> Alerts:
    settings, database = resources.settings, resources.database
    events, webhooks = Events(database), Webhooks(database)
    mailer = None if settings.smtp_url is None else Mailer(settings.smtp_url, settings.mail_from)
    sender = Sender(settings.key_pepper, mailer)
    fleet_events = FleetEvents(events, records.tenants, resources.metrics, serving.quarantine)
    serving.registry.on_mismatch = fleet_events.note_mismatch
    serving.registry.on_death = fleet_events.deaths.note
    watch = Watch(
        events,
        Budgets(BudgetedTenants(database), Spending(database), records.changes),
        Leadership(database, "watch", WATCH_SECONDS),
        resources.metrics,
        lambda: serving.registry.engines,
        fleet_events,
    )
    return Alerts(
        events, webhooks, sender, Outbox(webhooks, Leadership(database, "outbox", OUTBOX_SECONDS), sender), watch
    )
