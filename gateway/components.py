"""Construction of a gateway's components that do not depend on routes: records, billing, fleet of engines."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from gateway.access.auth import Authenticator
from gateway.access.credentials import StrongSecrets
from gateway.access.peppers import split_peppers
from gateway.access.sessions import Sessions
from gateway.access.throttle import WrongKeyThrottle
from gateway.billing.account import Accounting
from gateway.billing.journal import Journal, journal_folder, report_others
from gateway.billing.ledger import Ledger
from gateway.billing.stream import UsageStream
from gateway.billing.usage_log_client import UsageLogClient
from gateway.billing.writer import UsageWriter
from gateway.fleet.adapter_probes import AdapterProber
from gateway.fleet.attempt_runner import AttemptRunner
from gateway.fleet.client import EngineClient
from gateway.fleet.discovery.addresses import ANNOUNCED
from gateway.fleet.discovery.discovery import Announcements, Discovery
from gateway.fleet.discovery.drains import Drains
from gateway.fleet.discovery.health_checks import HealthChecks
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.engine_tokenizer import EngineTokenizer
from gateway.fleet.failures.isolation import Isolation
from gateway.fleet.failures.kept_engine import KeptEngine
from gateway.fleet.failures.quarantine import Quarantine
from gateway.fleet.failures.shared_deaths import SharedDeaths
from gateway.fleet.history import History
from gateway.fleet.kinds.kind import Services
from gateway.fleet.kinds.last_uses import LastUses
from gateway.fleet.kinds.table import make_kinds
from gateway.fleet.queueing.base_queues import BaseQueues
from gateway.fleet.queueing.engine_service import EngineService
from gateway.fleet.queueing.fairness import Fairness
from gateway.fleet.queueing.service_counters import ServiceCounters
from gateway.fleet.queueing.shared_service import SharedService
from gateway.fleet.routing.operator_prefetch import OperatorPrefetch
from gateway.fleet.routing.pinning import Pinning
from gateway.fleet.routing.prefetch import Prefetch
from gateway.fleet.tokenizers import Tokenizers
from gateway.quota.fallback import parse_fallback
from gateway.quota.quota import Quota
from gateway.records.activity.report import Activity
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.list import AdapterList
from gateway.records.adapters.pins import pinned_bases
from gateway.records.adapters.use import AdapterUses
from gateway.records.audit import Audit
from gateway.records.bases.records import BaseRecords
from gateway.records.bases.registry import Bases
from gateway.records.caches.cached_query import CachedQuery
from gateway.records.caches.changes import TRUST_SECONDS, Changes
from gateway.records.keys.keys import Keys
from gateway.records.keys.list import KeyLists
from gateway.records.keys.sessions import SessionRecords
from gateway.records.money.plans import Plans
from gateway.records.money.prices import PriceList, Prices
from gateway.records.partitions.request_ids import RequestIds
from gateway.records.past_usage import PastUsage
from gateway.records.requests.log import RequestLog
from gateway.records.requests.refused import RefusalLog
from gateway.records.tenants.bulk import TenantBulk
from gateway.records.tenants.list import TenantLists
from gateway.records.tenants.tenants import Tenants
from gateway.records.usage.report import UsageReport
from gateway.resources import Resources
from gateway.settings import OFF


@dataclass(frozen=True, slots=True)
class Records:
    """Records in SQL, and the authenticator of keys."""

    tenants: Tenants
    keys: Keys
    report: UsageReport
    bases: Bases
    changes: Changes
    catalog: Catalog
    adapter_list: AdapterList
    adapter_uses: AdapterUses
    key_lists: KeyLists
    tenant_lists: TenantLists
    tenant_bulk: TenantBulk
    plans: Plans
    prices: Prices
    price_list: PriceList
    audit: Audit
    refusals: RefusalLog
    request_log: RequestLog
    activity: Activity
    auth: Authenticator
    session_records: SessionRecords
    sessions: Sessions
    is_proved: Callable[[str], bool]
    wrong_keys: WrongKeyThrottle
    request_ids: RequestIds


@dataclass(frozen=True, slots=True)
class Billing:
    """Limits, settlement and the ledger."""

    quota: Quota
    stream: UsageStream
    ledger: Ledger
    usage_logs: UsageLogClient
    accounting: Accounting


@dataclass(frozen=True, slots=True)
class Serving:
    """Engines: discovery, queue and dispatch."""

    announcements: Announcements | None
    registry: Registry
    drains: Drains
    history: History
    fairness: Fairness
    queues: BaseQueues
    shared_service: SharedService
    engine_service: EngineService
    quarantine: Quarantine
    kept_engine: KeptEngine
    prober: AdapterProber
    tokenizers: Tokenizers
    pinning: Pinning
    operator_prefetch: OperatorPrefetch
    dispatcher: Dispatcher


def build_records(resources: Resources) -> Records:
    """Return the records and the authenticator, which share the database and its changes."""
    settings, database = resources.settings, resources.database
    changes = Changes(database, settings.key_trust_seconds)
    keys, prices, lists = Keys(database), Prices(database), TenantLists(database)
    admin_key = None if settings.admin_key == OFF else settings.admin_key
    # Strong secrets need no throttle: they are compared from every address and on every port.
    strong = StrongSecrets(admin_key, settings.announce_token or settings.internal_token)
    anywhere = settings.admin_port is None or (admin_key is not None and strong.contains(admin_key))
    auth = Authenticator(keys, settings.key_pepper, admin_key, changes, admin_key_anywhere=anywhere)
    session_records, provider = SessionRecords(database), settings.oidc_provider
    sessions = Sessions(
        session_records,
        auth,
        changes,
        lifetime=timedelta(seconds=settings.session_seconds),
        idle=timedelta(seconds=settings.session_idle_seconds),
        proofs=frozenset(filter(None, [auth.bootstrap_proof, provider.proof if provider is not None else None])),
    )

    bases = Bases(BaseRecords(database), None if resources.model is None else resources.model.base)

    def is_proved(presented: str) -> bool:
        return auth.is_issued(presented) or strong.contains(presented)

    return Records(
        Tenants(database),
        keys,
        UsageReport(database),
        bases,
        changes,
        Catalog(database, bases, changes, TRUST_SECONDS),
        AdapterList(database),
        AdapterUses(database),
        KeyLists(database),
        lists,
        TenantBulk(database, lists),
        Plans(database),
        prices,
        PriceList(prices, bases, settings.currency),
        Audit(database),
        RefusalLog(database, resources.metrics.refusals_only_counted),
        RequestLog(database),
        Activity(database, timedelta(hours=settings.minute_sums_hours)),
        auth,
        session_records,
        sessions,
        is_proved=is_proved,
        wrong_keys=WrongKeyThrottle(
            resources.metrics, is_proved, resources.redis, settings.database_url, settings.admin_port
        ),
        request_ids=RequestIds(database),
    )


def build_billing(resources: Resources, bases: Bases, fairness: Fairness) -> Billing:
    """Return the limits, the ledger, and the accounts that use both."""
    settings, redis, database = resources.settings, resources.redis, resources.database
    folder = journal_folder(settings.journal_dir.expanduser(), settings.database_url)
    report_others(folder)
    journal = Journal(folder, settings.journal_bytes)
    stream = UsageStream(redis, settings.redis_timeout)
    ledger = Ledger(UsageWriter(database), stream, journal, settings.max_ledger_waiting_rows)
    quota = Quota(
        redis,
        settings.redis_timeout,
        settings.lease_seconds,
        parse_fallback(settings.quota_fallback),
        resources.metrics.admitted_without_redis,
        PastUsage(database, bases),
        settings.redis_check,
    )
    usage_logs = UsageLogClient(resources.session, settings.internal_token)
    accounting = Accounting(quota, ledger, resources.metrics, usage_logs)
    accounting.on_start = lambda principal, seconds: fairness.note_start(principal.tenant, seconds)
    return Billing(quota, stream, ledger, usage_logs, accounting)


def _connect_quarantine(registry: Registry, quarantine: Quarantine) -> None:
    """Give the quarantine the engines' deaths and the engines.

    Give the registry the orphaned requests that the quarantine reads.
    """
    registry.on_end = quarantine.note_instance_death
    quarantine.engines = lambda: registry.with_dropped
    quarantine.take_over = registry.take_over


def build_serving(resources: Resources, bases: Bases, changes: Changes) -> Serving:
    """Return the fleet of engines, its queue and its watchers."""
    settings, redis, timeout = resources.settings, resources.redis, resources.settings.engine_timeout
    announcements = Announcements(redis, settings.redis_timeout) if ANNOUNCED in settings.engines else None
    services = Services(
        session=resources.session,
        internal_token=settings.internal_token,
        base_names=lambda: bases.names,
        store=resources.store,
        uses=LastUses(redis, settings.redis_timeout),
        heartbeat_timeout=settings.engine_heartbeat_timeout,
    )
    kinds = make_kinds(services)
    health_checks = HealthChecks(resources.session, kinds, bases, settings.internal_token)
    registry = Registry(Discovery(settings.engine_addresses, announcements), health_checks, timeout)
    counters = ServiceCounters()
    queues = BaseQueues(registry.capacity_of, counters, settings.queue_length, settings.queue_seconds)
    quarantine = Quarantine(
        settings.quarantine_seconds,
        split_peppers(settings.key_pepper)[0].encode(),
        SharedDeaths(redis, settings.database_url),
        resources.metrics.quarantined,
        report_detached=registry.report_detached,
    )
    _connect_quarantine(registry, quarantine)
    client = EngineClient(kinds)
    engine_service = EngineService(lambda: registry.up, client.send_service)
    kept_engine = KeptEngine(redis, settings.database_url, lambda: quarantine.remembers_deaths)
    isolation = Isolation(lambda base: registry.of_base(base).engines, kept_engine)
    quarantine.is_alone = isolation.is_alone
    attempt_runner, prefetch = AttemptRunner(registry, client, quarantine), Prefetch(client.send_hint)
    dispatcher = Dispatcher(registry, attempt_runner, queues, timeout, isolation, engine_service, prefetch, bases)
    pinned = CachedQuery(changes, lambda: pinned_bases(resources.database))
    pinning = Pinning(registry.of_base, pinned.get, client.send_pins, dispatcher.rates)
    shared_service = SharedService(redis, settings.database_url, counters)
    own = None if resources.model is None else (resources.model.base.name, resources.model.tokenizer)

    def judge_again() -> None:
        for engine in registry.up:
            health_checks.judge(engine)

    bases.changed = judge_again
    prober = AdapterProber(registry, kinds, quarantine, isolation.allows)
    return Serving(
        announcements=announcements,
        registry=registry,
        drains=Drains(redis, settings.redis_timeout, registry, queues.admit),
        history=History(registry, queues),
        fairness=Fairness(queues, counters, lambda: registry.up),
        queues=queues,
        shared_service=shared_service,
        engine_service=engine_service,
        quarantine=quarantine,
        kept_engine=kept_engine,
        prober=prober,
        tokenizers=Tokenizers(EngineTokenizer(registry, kinds).tokens, own),
        pinning=pinning,
        operator_prefetch=OperatorPrefetch(registry, client.send_hint),
        dispatcher=dispatcher,
    )
