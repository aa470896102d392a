"""Parser of the items of `LORAPLEX_ENGINES`: an engine's address, kind and limits."""

import re
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from gateway.fleet.engines.engine import Address
from gateway.fleet.engines.traits import OwnFields
from gateway.fleet.kinds.table import KINDS

# An item in place of a URL: engines may announce themselves (`loraplex engine --gateway`).
ANNOUNCED = "announced"
TRAITS = {kind.traits.prefix: kind.traits for kind in KINDS}
PREFIXES = " or ".join(prefix for prefix in TRAITS if prefix)
OPTIONS = "adapters=N, requests=N, max_rank=N, key_env=NAME, key_file=PATH, any_version=true, prefill=URL"
# Numeric options, with the least number of each.
MIN_VALUES = {"adapters": 0, "requests": 1, "max_rank": 1}
# Options that an announcement may not have, because its author could name a secret's file or another server.
OPERATORS_ONLY = ("key_env", "key_file", "any_version", "prefill")

_KEY = re.compile(r"[!-~]+")
# A function that returns the API key named by `key_env` or `key_file`. Raises ValueError.
ReadKey = Callable[[str, str], str]


def parse_address(text: str, read_key: ReadKey | None = None) -> Address:
    """Parse `http://host:port` or `dns://name:port`, each with an optional prefix (the kind) and `?` with options.

    read_key: None for a text that is not the operator's, such as an announcement. Such a text must not name a file or
    variable, whose content would be sent to its author. Raises ValueError without quoting the URL, which may hold a
    secret.
    """
    prefix = next((prefix for prefix in TRAITS if prefix and text.startswith(prefix)), "")
    traits, parts = TRAITS[prefix], urlsplit(text.removeprefix(prefix))
    if parts.scheme not in ("http", "https", "dns") or not parts.hostname:
        raise ValueError(
            f"expected http://, https:// or dns://, or the word {ANNOUNCED}; the URL of a foreign server begins with "
            f"{PREFIXES}"
        )
    _check_no_user(parts)
    if parts.scheme == "dns" and parts.port is None:
        raise ValueError("expected a port in dns://name:port")
    if not traits.has_own_secret:
        return Address(_plain(parts), traits, wake=_wake(parts.query, read_key))
    options = _options(parts.query, read_key)
    if "prefill" in options and not traits.splits_prompts:
        raise ValueError(f"prefill: not supported for {traits.title}; it names a second server, which computes prompts")
    return Address(_plain(parts), traits, **options)


def own_fields(addresses: Sequence[Address]) -> list[type[OwnFields]] | None:
    """Return the additional request fields of the listed foreign servers; None if no such server is listed."""
    foreign = {address.traits.name: address.traits for address in addresses if address.traits.has_own_secret}
    return [traits.own_fields for traits in foreign.values() if traits.own_fields is not None] if foreign else None


def _wake(query: str, read_key: ReadKey | None) -> str | None:
    """Return the supervisor's URL in the options of an engine of ours. Only the operator may name one, because gateways
    send it the internal token.
    """
    if not query:
        return None
    options = parse_qsl(query, keep_blank_values=True)
    wake = urlsplit(dict(options).get("wake", ""))
    if read_key is None or [name for name, _ in options] != ["wake"]:
        raise ValueError(
            f"options after a ? need {PREFIXES} before the URL; a listed Loraplex engine may have wake=URL only"
        )
    if wake.scheme not in ("http", "https") or not wake.hostname or "@" in wake.netloc:
        raise ValueError("wake: expected the http:// or https:// URL of the engine's supervisor")
    return wake.geturl()


def _options(query: str, read_key: ReadKey | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if read_key is None and name in OPERATORS_ONLY:
            raise ValueError(f"only an engine that LORAPLEX_ENGINES lists may have the option {name}")
        if name in MIN_VALUES and value.isdecimal() and int(value) >= MIN_VALUES[name]:
            options[name] = int(value)
        elif name == "any_version" and value in ("true", "false"):
            options[name] = value == "true"
        elif name == "prefill" and (second := urlsplit(value)).scheme in ("http", "https") and second.hostname:
            _check_no_user(second)
            options[name] = _plain(second)
        elif read_key is not None and name in ("key_env", "key_file") and value and "key" not in options:
            options["key"] = read_key(name, value).strip()
            if not _KEY.fullmatch(options["key"]):
                raise ValueError(f"expected a key of ASCII characters without spaces in {name}")
        else:
            raise ValueError(
                f"expected options among {OPTIONS} after the ?, whole numbers above 0 (adapters may be 0), and at most "
                "one key"
            )
    return options


def _check_no_user(parts: SplitResult) -> None:
    if "@" in parts.netloc:
        raise ValueError("expected no user or password in the URL; a server's key is named by key_env or key_file")


def _plain(parts: SplitResult) -> str:
    """Return a URL without its options."""
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
