"""Construction of the console's pages."""

from typing import Any

from gateway.api.key_manager import KeyManager
from gateway.components import Billing, Records
from gateway.pages.console.access import Console
from gateway.pages.console.adapters import ConsoleAdapters
from gateway.pages.console.audit import ConsoleAudit
from gateway.pages.console.help import ConsoleHelp
from gateway.pages.console.home import ConsoleHome
from gateway.pages.console.keys import ConsoleKeys
from gateway.pages.console.playground import ConsolePlayground
from gateway.pages.console.requests import ConsoleRequests
from gateway.pages.console.usage import ConsoleUsage
from gateway.pages.frame.frame import Frame
from gateway.pages.widgets.examples import KeyExamples
from gateway.records.activity.report import Activity
from gateway.records.money.priced_names import AdapterPrices
from gateway.records.requests.log import RequestLog
from gateway.records.usage.ranking import UsageRanking
from gateway.resources import Resources


def build_console(
    resources: Resources, frame: Frame, records: Records, billing: Billing, activity: Activity
) -> list[Any]:
    """Return the objects of the console's pages."""
    settings, database = resources.settings, resources.database
    console = Console(frame, records, billing.quota, settings.currency, records.bases)
    prices = AdapterPrices(database, records.price_list)
    manager = KeyManager(auth=records.auth, keys=records.keys, catalog=records.catalog)
    examples = KeyExamples(records.catalog, records.bases, port=settings.port, admin_port=settings.admin_port)
    return [
        ConsoleHome(console, activity),
        ConsoleRequests(console, RequestLog(database)),
        ConsoleAdapters(console, prices),
        ConsolePlayground(console),
        ConsoleUsage(console, UsageRanking(database)),
        ConsoleKeys(console, manager, examples),
        ConsoleAudit(console),
        ConsoleHelp(console),
    ]
