"""Configuration of the gateway: one frozen struct, read once from the environment and checked on load.

No other module of `gateway/` reads the environment.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

from gateway.access.credentials import MIN_BITS, guess_bits
from gateway.fleet.addresses import ANNOUNCED, Address, parse_address
from gateway.quota.fallback import parse_check, parse_fallback
from gateway.redis.sentinel import check_sentinel_url

Network = IPv4Network | IPv6Network

PREFIX = "LORAPLEX_"
MIN_SECRET_CHARS = 16
# Value of LORAPLEX_ADMIN_KEY that disables the bootstrap admin key.
OFF = "off"


class SettingsError(ValueError):
    """A setting is missing, unknown or out of range. `field` is the name of the variable or override."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings. Each can be given as `LORAPLEX_<FIELD>` or as an override; sizes are in bytes, durations in seconds."""

    database_url: str = field(repr=False)
    redis_url: str = field(repr=False)
    engines: tuple[str, ...]
    internal_token: str = field(repr=False)
    adapter_store: str
    model_dir: Path
    base_model: str
    key_pepper: str = field(repr=False)
    # Admin key that needs no database; OFF if the database holds another admin key.
    admin_key: str = field(default=OFF, repr=False)
    # Secret with which an engine announces itself. None: the internal token.
    announce_token: str | None = field(default=None, repr=False)

    host: str = "127.0.0.1"
    port: int = 8080
    # Number of processes that share the port. Each serves its own metrics: worker n (from 0) at metrics_port + n.
    workers: int = 1
    # None: the admin API, the dashboard and announcements of engines are on the main port as well.
    admin_port: int | None = None
    # None: /metrics is on the main port, for admin keys only.
    metrics_port: int | None = None
    # None: the context length in the model's config.json. Set it to the engines' --max-model-len if they have one.
    max_model_len: int | None = None
    # Tokens that a chat request without `max_tokens` reserves and may generate, if the context has room for them.
    default_max_tokens: int = 512
    max_body_bytes: int = 8 * 2**20
    # Memory of one worker for bodies over 64 KiB, held until their requests end; a tenant gets at most half.
    body_memory_bytes: int = 40 * 2**20
    max_upload_bytes: int = 2 * 2**30
    # Migrate the schema on start. Meant for one local gateway; a fleet runs `loraplex migrate` once instead.
    migrate_on_start: bool = False
    # Hard deadline of one Redis call. After it the request is refused with 503.
    redis_timeout: float = 1.0
    # Length of a lease. If the gateway does not extend it, the request's concurrency slot is released after this time.
    lease_seconds: float = 30.0
    # Mode of admission while Redis is away: closed, open or local, for all limits or by class (`requests=local`).
    quota_fallback: tuple[str, ...] = ("closed",)
    # Reaction to bad settings of Redis (eviction, persistence): warn, refuse (`/readyz` returns 503) or off.
    redis_check: str = "warn"
    # A request ends if its engine sends no byte for this long.
    engine_timeout: float = 300.0
    # An engine that does not report its state for this long is down; its requests without a first byte are sent to
    # another engine.
    engine_silence: float = 5.0
    # Length of a quarantine, and the time for which an engine's death counts.
    quarantine_seconds: float = 600.0
    # Days for which audit entries of tenants' own changes are kept; operators' entries are not removed.
    tenant_audit_days: float = 90.0
    # Maximum number of requests that wait while every engine is full, and maximum wait of one; beyond either, 429.
    queue_length: int = 512
    queue_seconds: float = 30.0
    # Open connections of one worker. A tenant may hold half of them, all clients without a verified key a quarter.
    max_connections: int = 4096
    # Requests a second that no engine serves, for one key or one address without a key; beyond the rate they wait.
    unserved_per_second: float = 20.0
    # A connection that receives no complete head of a request for this long is closed.
    idle_timeout: float = 75.0
    # Time limit for a JSON body, from the arrival of its head.
    body_timeout: float = 30.0
    # Time limit of an inference request as a whole.
    request_timeout: float = 3600.0
    # Time limit of an adapter upload including its check, and its minimum average rate in bytes a second.
    upload_timeout: float = 3600.0
    upload_min_rate: int = 16 * 2**10
    # Maximum rank of an uploaded adapter. None: the largest that an engine reports, 64 before any report.
    max_lora_rank: int | None = None
    # A client with unread bytes of an answer is disconnected if it reads less than `least_read_rate` bytes a second for
    # this long.
    client_timeout: float = 60.0
    least_read_rate: float = 1024.0
    # Maximum size of an answer that is not streamed. A request whose tokens, choices and log-probabilities could exceed
    # it is refused.
    max_answer_bytes: int = 8 * 2**20
    # Unread bytes of a stream at which its engine place is released for other requests; also the maximum size of an
    # event.
    # Then the memory of one worker for the unread answers of all clients; a tenant gets at most half of it.
    reader_buffer_bytes: int = 2**20
    answer_memory_bytes: int = 32 * 2**20
    # Networks of proxies whose X-Forwarded-For is trusted, so that wrong keys count against the client's own address.
    trusted_proxies: tuple[str, ...] = ()
    # Time for which running streams continue after SIGTERM.
    shutdown_seconds: float = 20.0
    # Time before that in which `/readyz` returns 503 but requests are accepted, so that load balancers switch over.
    drain_delay: float = 0.0
    # Time for which cached keys, names and prices stay valid while the database is away; 0.5 is strict.
    key_trust_seconds: float = 0.5
    # Whether `/readyz` returns 200 (degraded) or 503 (strict) while the database, Redis or all engines are away.
    readiness: str = "degraded"
    # Maximum wait for the database at the start of a gateway.
    database_wait: float = 30.0
    # Maximum number of usage rows that wait while SQL is away; beyond it no request is admitted.
    ledger_queue: int = 20_000
    # Folder of the usage journal, used while Redis is away: one for a host, on a disk that outlives the process.
    journal_dir: Path = Path("~/.local/state/loraplex/journal")
    journal_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        for name in ("internal_token", "key_pepper", "admin_key", "announce_token"):
            _check_secret(name, getattr(self, name))
        if not self.engines:
            raise SettingsError(env_name("engines"), f"expected at least one engine URL, or the word {ANNOUNCED}")
        try:
            addresses = self.engine_addresses
        except ValueError as error:
            raise SettingsError(env_name("engines"), str(error)) from error
        if len({address.url for address in addresses}) < len(addresses):
            raise SettingsError(env_name("engines"), "an engine is named twice")
        try:
            _ = self.proxy_networks
        except ValueError as error:
            raise SettingsError(env_name("trusted_proxies"), f"expected networks like 10.0.0.0/8: {error}") from error
        _check_url("redis_url", self.redis_url, {"redis", "rediss", "unix"})
        try:
            check_sentinel_url(self.redis_url)
        except ValueError as error:
            raise SettingsError(env_name("redis_url"), str(error)) from error
        try:
            parse_fallback(self.quota_fallback)
        except ValueError as error:
            raise SettingsError(env_name("quota_fallback"), str(error)) from error
        try:
            parse_check(self.redis_check)
        except ValueError as error:
            raise SettingsError(env_name("redis_check"), str(error)) from error
        _check_url("database_url", self.database_url, {"sqlite", "postgresql", "postgres"})
        if not self.base_model:
            raise SettingsError(env_name("base_model"), "expected the served name of the base model")
        if not (self.model_dir / "config.json").is_file():
            raise SettingsError(
                env_name("model_dir"), f"expected a model folder with a config.json, got {self.model_dir}"
            )
        for name in ("port", "metrics_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise SettingsError(env_name(name), f"expected a port between 0 and 65535, got {value}")
        if self.admin_port is not None and not (0 < self.admin_port <= 65535 and self.admin_port != self.port):
            problem = f"expected a port between 1 and 65535 other than LORAPLEX_PORT, got {self.admin_port}"
            raise SettingsError(env_name("admin_port"), problem)
        if self.workers > 1 and self.metrics_port is None:
            raise SettingsError(
                env_name("metrics_port"),
                "is required with several workers: worker n serves its own metrics at port + n",
            )
        if self.readiness not in ("degraded", "strict"):
            raise SettingsError(env_name("readiness"), f"expected degraded or strict, got {self.readiness!r}")
        positive = (
            "workers",
            "max_model_len",
            "default_max_tokens",
            "max_body_bytes",
            "max_upload_bytes",
            "upload_min_rate",
            "max_lora_rank",
            "ledger_queue",
            "journal_bytes",
            "max_connections",
            "unserved_per_second",
            "idle_timeout",
            "body_timeout",
            "request_timeout",
            "least_read_rate",
            "max_answer_bytes",
            "reader_buffer_bytes",
        )
        durations = (
            "redis_timeout",
            "key_trust_seconds",
            "lease_seconds",
            "engine_timeout",
            "client_timeout",
            "upload_timeout",
            "shutdown_seconds",
            "engine_silence",
            "quarantine_seconds",
            "tenant_audit_days",
        )
        for name in (*positive, *durations, "queue_length", "queue_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SettingsError(env_name(name), f"expected a number above 0, got {value}")
        if self.body_memory_bytes < 4 * self.max_body_bytes:
            raise SettingsError(env_name("body_memory_bytes"), "expected at least four times LORAPLEX_MAX_BODY_BYTES")
        if self.answer_memory_bytes < 2 * max(self.max_answer_bytes, self.reader_buffer_bytes):
            raise SettingsError(
                env_name("answer_memory_bytes"),
                "expected at least twice LORAPLEX_MAX_ANSWER_BYTES and LORAPLEX_READER_BUFFER_BYTES",
            )
        for name in ("drain_delay", "database_wait"):
            if not getattr(self, name) >= 0:
                raise SettingsError(env_name(name), f"expected seconds, 0 or more, got {getattr(self, name)}")

    @property
    def engine_addresses(self) -> list[Address]:
        """Return the engines that are listed in the settings, without those that announce themselves."""
        return [parse_address(text, _read_key) for text in self.engines if text != ANNOUNCED]

    @property
    def proxy_networks(self) -> list[Network]:
        return [ip_network(text) for text in self.trusted_proxies]

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> "Settings":
        """Load the settings from `overrides` and `environ` (None: the process's own environment).

        An override takes precedence; None means "not given". Raises SettingsError naming the variable or the override.
        """
        environ = os.environ if environ is None else environ
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(overrides) - set(names))
        if unknown:
            raise SettingsError(unknown[0], f"unknown setting; known are: {', '.join(names)}")
        _refuse_misspelt(environ, names)
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for f in fields(cls):
            given = overrides.get(f.name)
            if given is None:
                given = environ.get(env_name(f.name)) or None
            if given is not None:
                values[f.name] = _convert(f.name, hints[f.name], given)
            elif f.default is MISSING:
                raise SettingsError(env_name(f.name), "is required")
        return cls(**values)


def _read_key(source: str, name: str) -> str:
    """Return the API key of a vLLM server from a variable or a file."""
    try:
        return os.environ[name] if source == "key_env" else Path(name).expanduser().read_text()
    except KeyError:
        raise ValueError("key_env names a variable that is not set") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ValueError(f"key_file names a file that cannot be read: {reason}") from None


def env_name(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


def _refuse_misspelt(environ: Mapping[str, str], names: list[str]) -> None:
    """Raise SettingsError for a variable that looks like a misspelt setting.

    Other unknown names are accepted, because other programs of the project read `LORAPLEX_*` too.
    """
    known = [name.upper() for name in names]
    for variable in sorted(environ):
        suffix = variable.removeprefix(PREFIX)
        if variable.startswith(PREFIX) and suffix not in known:
            close = difflib.get_close_matches(suffix, known, n=1, cutoff=0.85)
            if close:
                raise SettingsError(variable, f"unknown setting; did you mean {PREFIX}{close[0]}?")


def _convert(name: str, hint: Any, value: Any) -> Any:
    """Convert a string, or an override that is already typed, to the field's type. Raises SettingsError."""
    try:
        if hint is bool:
            if isinstance(value, bool):
                return value
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[str(value).lower()]
        if hint == tuple[str, ...]:
            parts = value.split(",") if isinstance(value, str) else list(value)
            return tuple(part.strip().rstrip("/") for part in parts if part.strip())
        if hint is Path:
            return Path(value).expanduser()
        if hint is float:
            return float(value)
        if hint in (int, int | None):
            return int(value)
    except (KeyError, TypeError, ValueError) as error:
        expected = getattr(hint, "__name__", str(hint))
        raise SettingsError(env_name(name), f"expected {expected}, got {value!r}") from error
    if not isinstance(value, str):
        raise SettingsError(env_name(name), f"expected a string, got {type(value).__name__}")
    return value


def _check_secret(name: str, secret: str | None) -> None:
    """Raise SettingsError for a secret that can be guessed. The message does not quote it."""
    if secret is None or (name == "admin_key" and secret == OFF):
        return
    if len(secret) < MIN_SECRET_CHARS or guess_bits(secret) < MIN_BITS:
        raise SettingsError(
            env_name(name),
            f"expected a random secret of at least {MIN_SECRET_CHARS} characters and {MIN_BITS} bits, such as "
            "`openssl rand -hex 24` prints, not a word, name or pattern",
        )


def _check_url(name: str, url: str, schemes: set[str]) -> None:
    # The message does not quote the value, which may contain a password.
    scheme = urlsplit(url).scheme.split("+")[0]
    if scheme not in schemes:
        raise SettingsError(env_name(name), f"expected a URL starting with {' or '.join(sorted(schemes))}://")
