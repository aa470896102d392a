"""Configuration of the gateway: one frozen struct, read once from the environment and checked on load.

`load` reports every wrong setting at once. No other module of `gateway/` reads the environment.
"""

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal, get_type_hints
from urllib.parse import unquote, urlsplit

from gateway import setting_types as types
from gateway.access.oidc import Provider, parse_grant
from gateway.fleet.engines.engine import Address
from gateway.quota.fallback import Check
from gateway.setting_errors import NotUsableNow, Problems, SettingsError
from gateway.setting_types import OFF, PREFIX, Network, env_name
from wire.environment import SUFFIX, read_variable
from wire.errors import ConfigError

__all__ = ["OFF", "Network", "NotUsableNow", "Problems", "Settings", "SettingsError", "env_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings. Each can be given as `LORAPLEX_<FIELD>`, in a file named by `LORAPLEX_<FIELD>_FILE`, or as an override.

    Sizes are in bytes, durations in seconds.
    """

    database_url: types.DatabaseUrl = field(repr=False)
    redis_url: types.RedisUrl = field(repr=False)
    engines: types.Engines
    internal_token: types.Secret = field(repr=False)
    adapter_store: types.StorePath
    # A pepper, or two during a rotation: the new one, a comma, the old one.
    key_pepper: types.Peppers = field(repr=False)
    # Short form for a deployment's first base model: its folder, and its name in the API. None: all are on record.
    model_dir: types.ModelFolder | None = None
    base_model: types.ModelName | None = None
    # Admin key that needs no database; OFF if the database holds another admin key.
    admin_key: types.AdminKey = field(default=OFF, repr=False)
    # Secret with which an engine announces itself. None: the internal token.
    announce_token: types.Secret | None = field(default=None, repr=False)

    host: types.Text = "127.0.0.1"
    port: types.Port = 8080
    # Number of processes that share the port. Each serves its own metrics: worker n (from 0) at metrics_port + n.
    workers: types.Number = 1
    # None: the admin API, the dashboard and announcements of engines are on the main port as well.
    admin_port: types.AdminPort | None = None
    # None: /metrics is on the main port, for admin keys only.
    metrics_port: types.Port | None = None
    # None: the context length in the model's config.json. Set it to the engines' --max-model-len if they have one.
    max_model_len: types.Tokens | None = None
    # Tokens that a chat request without `max_tokens` reserves and may generate, if the context has room for them.
    default_max_tokens: types.Tokens = 512
    # Name that the dashboard shows on every page, such as production or staging; None: no name.
    environment: types.Environment | None = None
    # Currency of prices, budgets and costs, an ISO 4217 code.
    currency: types.Currency = "USD"
    max_body_bytes: types.Bytes = 8 * 2**20
    # Memory of one worker for bodies over 64 KiB, held until their requests end; a tenant gets at most half.
    body_memory_bytes: types.Bytes = 40 * 2**20
    max_upload_bytes: types.Bytes = 2 * 2**30
    # Migrate the schema on start. Meant for one local gateway; a fleet runs `loraplex migrate` once instead.
    migrate_on_start: bool = False
    # Hard deadline of one Redis call. After it the request is refused with 503.
    redis_timeout: types.Seconds = 1.0
    # Length of a lease. If the gateway does not extend it, the request's concurrency slot is released after this time.
    lease_seconds: types.Seconds = 30.0
    # Mode of admission while Redis is away: closed, open or local, for all limits or by class (`requests=local`).
    quota_fallback: types.Fallback = ("closed",)
    # Reaction to bad settings of Redis (eviction, persistence): warn, refuse (`/readyz` returns 503) or off.
    redis_check: Check = "warn"
    # A request ends if its engine sends no byte for this long.
    engine_timeout: types.Seconds = 300.0
    # An engine that does not report its state for this long is down; its requests without a first byte are sent to
    # another engine.
    engine_heartbeat_timeout: types.Seconds = 5.0
    # Length of a quarantine, and the time for which an engine's death counts.
    quarantine_seconds: types.Seconds = 600.0
    # Days for which audit entries of tenants' own changes are kept; operators' entries are not removed.
    tenant_audit_days: types.Days = 90.0
    # Hours for which the sums by minute of charts are kept.
    minute_sums_hours: types.Hours = 48.0
    # Days for which usage rows are kept; None: for ever.
    usage_days: types.Days | None = None
    # Days for which sums by hour and day are kept; None: for ever. Rows must not outlive their sums.
    sums_days: types.SumsDays | None = None
    # Days for which rows of refused requests are kept.
    refused_days: types.Days = 30.0
    # Maximum number of requests that wait while every engine is full, and maximum wait of one; beyond either, 429.
    queue_length: types.Number = 512
    queue_seconds: types.Seconds = 30.0
    # Open connections of one worker. A tenant may hold half of them, all clients without a verified key a quarter.
    max_connections: types.Number = 4096
    # Requests a second that no engine serves, for one key or one address without a key; beyond the rate they wait.
    unserved_per_second: types.Rate = 20.0
    # A connection that receives no complete head of a request for this long is closed.
    idle_timeout: types.Seconds = 75.0
    # Time limit for a JSON body, from the arrival of its head.
    body_timeout: types.Seconds = 30.0
    # Time limit of an inference request as a whole.
    request_timeout: types.Seconds = 3600.0
    # Time limit of an adapter upload including its check, and its minimum average rate in bytes a second.
    upload_timeout: types.Seconds = 3600.0
    min_upload_rate: types.Bytes = 16 * 2**10
    # Local folder for the copies and uploads of a store at s3://, and its size limit.
    adapter_cache: Path = Path("~/.cache/loraplex/adapters")
    adapter_cache_bytes: types.Bytes = 16 * 2**30
    # Whether a new version is probed in an engine before it is ready: while an engine can (auto), always or never.
    adapter_probe: Literal["auto", "required", "off"] = "auto"
    # Prefixes of hf://, s3:// and file:// from which tenants may import adapters, and the URL of the hub for hf://.
    import_sources: types.ImportSources = ()
    import_hub: types.Text = "https://huggingface.co"
    # Maximum rank of an uploaded adapter. None: the largest that an engine reports, 64 before any report.
    max_lora_rank: types.Number | None = None
    # A client with unread bytes of an answer is disconnected if it reads less than `min_read_rate` bytes a second on
    # average over this time.
    slow_reader_seconds: types.Seconds = 60.0
    min_read_rate: types.Rate = 1024.0
    # Maximum size of an answer that is not streamed. A request whose tokens, choices and log-probabilities could exceed
    # it is refused.
    max_answer_bytes: types.Bytes = 8 * 2**20
    # Unread bytes of a stream at which its engine place is released for other requests; also the maximum size of an
    # event.
    reader_buffer_bytes: types.Bytes = 2**20
    # Memory of one worker for the unread answers of all clients; a tenant gets at most half of it.
    answer_memory_bytes: types.Bytes = 32 * 2**20
    # Networks of proxies whose X-Forwarded-For is trusted, so that wrong keys count against the client's own address.
    trusted_proxies: types.Networks = ()
    # Origins of web pages that may call /v1 from a browser, such as https://chat.example.com.
    cors_origins: types.Origins = ()
    log_format: Literal["text", "json"] = "text"
    # Mail server for events, smtp:// (with STARTTLS) or smtps://, maybe with user and password; None: no e-mail.
    smtp_url: types.SmtpUrl | None = field(default=None, repr=False)
    # Sender's address of these e-mails.
    mail_from: types.MailAddress = "loraplex@localhost"
    # Hosts that operators' webhooks may reach by http://, without TLS.
    webhook_http_hosts: types.Hosts = ()
    # Whether a client's `traceparent` decides if the spans of its request are recorded.
    trust_traceparent: bool = False
    # Template of the URL of a request's trace, for the link on the request's page; None: no link.
    trace_url: types.TraceUrl | None = None
    # Seconds for which running requests continue after SIGTERM and `shutdown_delay`.
    shutdown_seconds: types.Seconds = 20.0
    # Seconds after SIGTERM in which `/readyz` is 503 while requests are still accepted; `shutdown_seconds` follows.
    shutdown_delay: types.Delay = 0.0
    # Maximum age of a browser's session, and maximum time without use.
    session_seconds: types.Seconds = 43_200.0
    session_idle_seconds: types.Seconds = 3600.0
    # OpenID Connect for log-ins: provider, client, the claim that holds a person's groups, and the groups' roles.
    oidc_issuer: types.Issuer | None = None
    oidc_client_id: types.Text | None = None
    oidc_client_secret: types.Text | None = field(default=None, repr=False)
    oidc_groups_claim: types.Text = "groups"
    oidc_roles: types.OidcRoles = ()
    # Time for which cached keys, names and prices stay valid while the database is away; 0.5 is strict.
    key_trust_seconds: types.Seconds = 0.5
    # Whether `/readyz` returns 200 (degraded) or 503 (strict) while the database, Redis or all engines are away.
    readiness: Literal["degraded", "strict"] = "degraded"
    # Maximum wait for the database at the start of a gateway.
    database_wait: types.Delay = 30.0
    # Maximum number of usage rows that wait while SQL is away; beyond it no request is admitted.
    max_ledger_waiting_rows: types.Number = 20_000
    # Folder of the usage journal, used while Redis is away: one for a host, on a disk that outlives the process.
    journal_dir: Path = Path("~/.local/state/loraplex/journal")
    journal_bytes: types.Bytes = 256 * 2**20

    @property
    def engine_addresses(self) -> list[Address]:
        """Return the engines that are listed in the settings, without those that announce themselves."""
        return types.parse_engines(self.engines)

    @property
    def oidc_provider(self) -> Provider | None:
        """Return the OpenID Connect provider, None if there is none."""
        if self.oidc_issuer is None or self.oidc_client_id is None:
            return None
        return Provider(
            issuer=self.oidc_issuer.rstrip("/"),
            client_id=self.oidc_client_id,
            client_secret=self.oidc_client_secret,
            claim=self.oidc_groups_claim,
            grants=tuple(parse_grant(text) for text in self.oidc_roles),
        )

    @property
    def proxy_networks(self) -> list[Network]:
        return [ip_network(text) for text in self.trusted_proxies]

    @property
    def disk_folders(self) -> dict[str, Path]:
        """Return the folders on this host that grow, by name: the adapter store or its copies, and the journal."""
        if self.adapter_store.startswith("s3://"):
            store = self.adapter_cache
        else:
            store = Path(
                unquote(urlsplit(self.adapter_store).path) if "://" in self.adapter_store else self.adapter_store
            )
        return {"adapter_store": store.expanduser(), "journal": self.journal_dir.expanduser()}

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> "Settings":
        """Load the settings from `overrides` and `environ` (None: the process's own environment).

        An override takes precedence; None means "not given". Raises SettingsError naming every wrong variable or
        override.
        """
        environ = os.environ if environ is None else environ
        problems, names = Problems(), [f.name for f in fields(cls)]
        for name in sorted(set(overrides) - set(names)):
            problems.add(name, f"unknown setting; known are: {', '.join(names)}")
        for variable, problem in _unknown(environ, names):
            problems.add(variable, problem)
        hints = get_type_hints(cls, include_extras=True)
        # Values by field, without the wrong ones.
        values: dict[str, Any] = {}
        for f in fields(cls):
            with problems.collect():
                given = overrides.get(f.name)
                if given is None:
                    given = _read(environ, env_name(f.name))
                if given is not None:
                    values[f.name] = types.convert(f.name, hints[f.name], given, quotes=f.repr)
                elif f.default is not MISSING:
                    values[f.name] = f.default
                else:
                    raise SettingsError(
                        env_name(f.name), f"is required; expected {types.expectation(hints[f.name]).title}"
                    )
        for name, others, holds, message in RELATIONS:
            if {name, *others} <= values.keys() and not holds(*(values[each] for each in (name, *others))):
                problems.add(env_name(name), message)
        problems.report()
        return cls(**values)


# Variables of earlier releases, without the prefix, and their names now. A former name alone is refused, because a
# setting that is not read would change the gateway silently. With the new name beside it, gateways of both releases can
# share one environment during an upgrade.
RENAMED = {
    "CLIENT_TIMEOUT": "SLOW_READER_SECONDS",
    "DRAIN_DELAY": "SHUTDOWN_DELAY",
    "ENGINE_SILENCE": "ENGINE_HEARTBEAT_TIMEOUT",
    "LEAST_READ_RATE": "MIN_READ_RATE",
    "LEDGER_QUEUE": "MAX_LEDGER_WAITING_ROWS",
    "UPLOAD_MIN_RATE": "MIN_UPLOAD_RATE",
}

# Conditions on several settings: the setting that the error names, the other settings, a function of their values in
# this order that returns whether they fit, and the error.
RELATIONS: tuple[tuple[str, tuple[str, ...], Callable[..., bool], str], ...] = (
    (
        "oidc_client_id",
        ("oidc_issuer", "oidc_roles"),
        lambda client, issuer, roles: (issuer is None) == (client is None) == (not roles),
        f"expected together with {PREFIX}OIDC_ISSUER and {PREFIX}OIDC_ROLES",
    ),
    (
        "base_model",
        ("model_dir",),
        lambda name, folder: (name is None) == (folder is None),
        f"expected together with {PREFIX}MODEL_DIR",
    ),
    (
        "sums_days",
        ("usage_days",),
        lambda sums, rows: sums is None or (rows is not None and rows <= sums),
        f"expected together with {PREFIX}USAGE_DAYS, and at least as many days",
    ),
    ("admin_port", ("port",), lambda admin, port: admin != port, f"expected a port other than {PREFIX}PORT"),
    (
        "metrics_port",
        ("workers",),
        lambda port, workers: port is not None or workers == 1,
        "is required with several workers: worker n serves its own metrics at port + n",
    ),
    (
        "body_memory_bytes",
        ("max_body_bytes",),
        lambda memory, body: memory >= 4 * body,
        f"expected at least four times {PREFIX}MAX_BODY_BYTES",
    ),
    (
        "answer_memory_bytes",
        ("max_answer_bytes", "reader_buffer_bytes"),
        lambda memory, answer, buffer: memory >= 2 * max(answer, buffer),
        f"expected at least twice {PREFIX}MAX_ANSWER_BYTES and {PREFIX}READER_BUFFER_BYTES",
    ),
)


def _read(environ: Mapping[str, str], variable: str) -> str | None:
    """Return the text of a setting from its variable or its file; None if it is unset or empty."""
    try:
        return read_variable(variable, environ) or None
    except ConfigError as error:
        raise SettingsError(error.field, error.message) from error


def _unknown(environ: Mapping[str, str], names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the variables that have a setting's former name or look like a misspelt one, each with its error.

    Other unknown names are accepted, because other programs of the project read `LORAPLEX_*` too.
    """
    known = [name.upper() for name in names]
    for variable in sorted(environ):
        suffix = variable.removeprefix(PREFIX).removesuffix(SUFFIX)
        if variable.startswith(PREFIX) and suffix not in known:
            if now := RENAMED.get(suffix):
                if environ[variable] and _read(environ, env_name(now)) is None:
                    yield variable, f"the setting is now named {PREFIX}{now}"
            elif close := difflib.get_close_matches(suffix, known, n=1, cutoff=0.85):
                yield variable, f"unknown setting; did you mean {PREFIX}{close[0]}?"
