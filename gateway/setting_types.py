"""Types of the gateway's settings. Each states its range or choices and the text of its error."""

import os
import re
from collections.abc import Callable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from gateway.access.credentials import MIN_BITS, guess_bits
from gateway.access.oidc import parse_grant
from gateway.access.peppers import split_peppers
from gateway.fleet.discovery.addresses import ANNOUNCED, parse_address
from gateway.fleet.engines.engine import Address
from gateway.quota.fallback import parse_fallback
from gateway.records.sql.urls import EXPECTED, parse_url
from gateway.redis.sentinel import check_sentinel_url
from gateway.setting_errors import SettingsError

Network = IPv4Network | IPv6Network

PREFIX = "LORAPLEX_"
MIN_SECRET_CHARS = 16
# Value of LORAPLEX_ADMIN_KEY that disables the bootstrap admin key.
OFF = "off"
# Accepted texts of a setting that is true or false.
FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
# Fields of the template of a trace's URL.
TRACE_FIELDS = ("request_id", "since", "until")
# Words after "expected" for types without metadata.
PLAIN = {bool: "true or false", Path: "a folder"}


def _check_secret(secret: str) -> None:
    """Raise ValueError for a secret that can be guessed."""
    if len(secret) < MIN_SECRET_CHARS or guess_bits(secret) < MIN_BITS:
        raise ValueError


def _check_peppers(text: str) -> None:
    for pepper in split_peppers(text):
        _check_secret(pepper)


def _check_admin_key(secret: str) -> None:
    if secret != OFF:
        _check_secret(secret)


def _check_engines(engines: Sequence[str]) -> None:
    addresses = parse_engines(engines)
    if len({address.url for address in addresses}) < len(addresses):
        raise ValueError("an engine is named twice")


def parse_engines(engines: Sequence[str]) -> list[Address]:
    return [parse_address(text, _read_key) for text in engines if text != ANNOUNCED]


def _read_key(source: str, name: str) -> str:
    """Return the API key of a vLLM server from a variable or a file."""
    try:
        return os.environ[name] if source == "key_env" else Path(name).expanduser().read_text()
    except KeyError:
        raise ValueError("key_env names a variable that is not set") from None
    except RuntimeError as error:
        raise ValueError(f"key_file names a file of an unknown user: {error}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ValueError(f"key_file names a file that cannot be read: {reason}") from None


def _check_import_sources(sources: Sequence[str]) -> None:
    """Raise ValueError for a malformed prefix."""
    for source in sources:
        parts = urlsplit(source)
        is_place = len(parts.path) > 1 and not parts.netloc if parts.scheme == "file" else bool(parts.netloc)
        if parts.scheme not in ("hf", "s3", "file") or not is_place or parts.query or parts.fragment:
            raise ValueError("expected prefixes like hf://org, s3://bucket/prefix or file:///folder")


def _check_issuer(issuer: str) -> None:
    parts = urlsplit(issuer)
    is_local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if not (parts.scheme == "https" or (parts.scheme == "http" and is_local)) or parts.query or parts.fragment:
        raise ValueError


def _check_oidc_roles(grants: Sequence[str]) -> None:
    for text in grants:
        parse_grant(text)


def _check_networks(networks: Sequence[str]) -> None:
    try:
        for text in networks:
            ip_network(text)
    except ValueError as error:
        raise ValueError(f"expected networks like 10.0.0.0/8: {error}") from error


def _check_origins(origins: Sequence[str]) -> None:
    """Raise ValueError unless each is an origin as browsers send it."""
    for origin in origins:
        parts = urlsplit(origin)
        is_exact = origin == f"{parts.scheme}://{parts.netloc}" == origin.lower()
        if (
            not is_exact
            or parts.scheme not in ("http", "https")
            or not parts.hostname
            or "@" in origin
            or "*" in origin
        ):
            raise ValueError("expected exact origins like https://chat.example.com or http://localhost:3000")


def _check_trace_url(url: str) -> None:
    """Raise ValueError for a template that is no http(s) URL, or has unknown fields or no `{request_id}`."""
    parts, used = urlsplit(url), re.findall(r"\{(\w+)\}", url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "{" in parts.netloc or not url.isprintable():
        raise ValueError
    if " " in url or "request_id" not in used or not set(used) <= set(TRACE_FIELDS):
        raise ValueError


def _check_name(name: str) -> None:
    if not name.isprintable() or name != name.strip():
        raise ValueError


def _check_smtp_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("smtp", "smtps") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError
    # Raises ValueError for a wrong port.
    _ = parts.port


def _check_redis_url(url: str) -> None:
    if urlsplit(url).scheme.split("+")[0] not in ("redis", "rediss", "unix"):
        raise ValueError
    check_sentinel_url(url)


def _check_model_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ValueError


def _expects(title: str, check: Callable[[Any], object] | None = None, **bounds: Any) -> Meta:
    """Return a field's metadata. title: the words after "expected" in an error. check: raises ValueError for a wrong
    value; its text, if it has one, replaces the error's.
    """
    return Meta(title=title, extra={"check": check}, **bounds)


Text = Annotated[str, _expects("a text", min_length=1)]
DatabaseUrl = Annotated[str, _expects(EXPECTED, parse_url)]
RedisUrl = Annotated[str, _expects("a URL that starts with redis://, rediss:// or unix://", _check_redis_url)]
Engines = Annotated[
    tuple[str, ...], _expects(f"at least one engine URL, or the word {ANNOUNCED}", _check_engines, min_length=1)
]
SECRET = (
    f"a random secret of at least {MIN_SECRET_CHARS} characters and {MIN_BITS} bits, such as `openssl rand -hex 24` "
    "prints, not a word, name or pattern"
)
Secret = Annotated[str, _expects(SECRET, _check_secret)]
Peppers = Annotated[str, _expects(f"{SECRET}, or the new and the old one, separated by a comma", _check_peppers)]
AdminKey = Annotated[str, _expects(f"{SECRET}; or {OFF}", _check_admin_key)]
ModelFolder = Annotated[Path, _expects("a model folder with a config.json", _check_model_folder)]
ModelName = Annotated[str, _expects("the name of the base model in the API", min_length=1)]
StorePath = Annotated[str, _expects("the adapter folder or s3:// URL that the engines read too", min_length=1)]
Fallback = Annotated[tuple[str, ...], _expects("modes of admission", parse_fallback)]
ImportSources = Annotated[tuple[str, ...], _expects("prefixes", _check_import_sources)]
Networks = Annotated[tuple[str, ...], _expects("networks", _check_networks)]
Origins = Annotated[tuple[str, ...], _expects("origins", _check_origins)]
SmtpUrl = Annotated[str, _expects("a URL like smtp://user:password@host:587 or smtps://host", _check_smtp_url)]
TraceUrl = Annotated[
    str, _expects("an http(s) URL with {request_id}, and maybe {since} and {until}, after its host", _check_trace_url)
]
MailAddress = Annotated[str, _expects("an e-mail address", pattern=r"^[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\Z")]
Hosts = Annotated[tuple[str, ...], _expects("names of hosts")]
Issuer = Annotated[str, _expects("a provider's URL that starts with https://", _check_issuer)]
OidcRoles = Annotated[tuple[str, ...], _expects("roles of groups", _check_oidc_roles)]
Port = Annotated[int, _expects("a port between 0 and 65535", ge=0, le=65535)]
AdminPort = Annotated[int, _expects("a port between 1 and 65535", ge=1, le=65535)]
Environment = Annotated[
    str,
    _expects("a name of at most 32 printable characters, such as production", _check_name, min_length=1, max_length=32),
]
Currency = Annotated[str, _expects("a code of three capital letters, such as EUR", pattern="^[A-Z]{3}$")]
Number = Annotated[int, _expects("a whole number above 0", gt=0)]
Tokens = Annotated[int, _expects("a number of tokens above 0", gt=0)]
Bytes = Annotated[int, _expects("a number of bytes above 0", gt=0)]
Rate = Annotated[float, _expects("a number above 0", gt=0)]
Seconds = Annotated[float, _expects("seconds above 0", gt=0)]
Delay = Annotated[float, _expects("seconds, 0 or more", ge=0)]
Hours = Annotated[float, _expects("hours above 0", gt=0)]
Days = Annotated[float, _expects("days above 0", gt=0)]
# Budgets and pages read sums of the last three months: the last month is compared with the one before it.
SumsDays = Annotated[float, _expects("at least 93 days", ge=93)]


def env_name(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


def convert(name: str, hint: Any, raw: Any, *, quotes: bool) -> Any:
    """Convert a string, or an override that is already typed, to a field's type, and check it. Raises SettingsError.

    quotes: whether an error may quote the value; secrets and URLs that can contain one are not quoted.
    """
    kind, meta = _kind(hint), expectation(hint)
    expected = f"expected {meta.title}" + (f"; got {str(raw)!r}" if quotes else "")
    try:
        value = msgspec.convert(_parse(kind, raw), hint)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        # RuntimeError: a path `~name` without such a user.
        raise SettingsError(env_name(name), expected) from error
    try:
        check = (meta.extra or {}).get("check")
        if check is not None and value is not None:
            check(value)
    except ValueError as error:
        raise SettingsError(env_name(name), str(error) or expected) from error
    return value


def _parse(kind: Any, raw: Any) -> Any:
    """Parse a text as a value of a field's type. Raises KeyError, TypeError or ValueError."""
    if kind is bool and isinstance(raw, str):
        return FLAGS[raw.lower()]
    if kind is tuple:
        parts = raw.split(",") if isinstance(raw, str) else list(raw)
        return tuple(part.strip().rstrip("/") for part in parts if part.strip())
    if kind is Path:
        return Path(raw).expanduser()
    return kind(raw) if kind in (int, float) else raw


def _kind(hint: Any) -> Any:
    """Return the plain type of a field: `tuple` for Annotated[tuple[str, ...], ...] | None."""
    if get_origin(hint) is Annotated:
        return _kind(get_args(hint)[0])
    if get_origin(hint) is UnionType or get_origin(hint) is Union:
        return _kind(get_args(hint)[0])
    return get_origin(hint) or hint


def expectation(hint: Any) -> Meta:
    """Return the metadata of a field. If it has none, make it from the field's choices or type."""
    if get_origin(hint) in (UnionType, Union):
        return expectation(get_args(hint)[0])
    if get_origin(hint) is Annotated:
        meta: Meta = get_args(hint)[1]
        return meta
    return Meta(title=", ".join(get_args(hint)) or PLAIN[hint])
