"""Fields of forms: terms of tenants, plans and keys, and amounts of money and bytes, as people write them."""

import re
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal, DecimalException
from typing import Any, NamedTuple

import msgspec

from gateway.limits.kinds import ADAPTER_KINDS, BUDGET_NAMES, KINDS, REQUEST_KINDS
from gateway.records.tenants.limits import Limits
from gateway.records.tenants.terms import Terms, given_terms
from wire.money import MICRO_UNITS, exact_money, format_money

NO_LIMIT = "none"
MONEY = frozenset(BUDGET_NAMES)
BYTES = frozenset(kind.name for kind in KINDS if kind.takes == "bytes")
# Suffixes of whole numbers, and units of bytes, the largest last.
FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class TermField(NamedTuple):
    """Field of a form. value: the own term as text, empty if inherited. inherited: the value without an own term.

    choices: (value, title) of the only possible values; empty for a field of text.
    """

    name: str
    title: str
    hint: str
    value: str
    inherited: str
    unit: str
    choices: Sequence[tuple[str, str]] = ()


class FieldGroup(NamedTuple):
    """Fields of a form under one heading."""

    title: str
    hint: str
    fields: list[TermField]


OTHERS = (
    ("budget_warn_at", "Events at shares of budgets", "Such as 50 %, 80 %, 100 %, or none."),
    (
        "model_limits",
        "Limits of single models",
        "A model on each line, such as: pirate: requests_per_minute=10 budget_per_month=2.50. The name * covers all "
        "adapters without their own limits.",
    ),
    ("weight", "Weight", "Share of a busy engine, relative to other tenants."),
    ("priority", "Priority", "From 0, served first, to 9, refused first under overload."),
    ("ttft_target", "Time to first token", "Wanted time in seconds, or none."),
    ("on_token_limit", "At a token limit", ""),
)
ON_TOKEN_LIMIT = {"refuse": "Refuse the request", "shorten": "Shorten the answer"}
BYTES_HINT = "Such as 512 MiB or 4 GiB."
TITLES = {kind.name: (kind.help, BYTES_HINT if kind.name in BYTES else "") for kind in KINDS} | {
    name: (title, hint) for name, title, hint in OTHERS
}
LIMIT_NAMES = tuple(kind.name for kind in REQUEST_KINDS)
BUDGET_TERMS = (*BUDGET_NAMES, "budget_warn_at")
GROUPS: Sequence[tuple[str, str, Sequence[str]]] = (
    ("Requests and tokens", "", tuple(name for name in LIMIT_NAMES if name not in MONEY)),
    ("Budgets", "A spent budget refuses requests; a soft budget only causes an event.", BUDGET_TERMS),
    ("Models", "", ("model_limits",)),
    ("Adapters", "", tuple(kind.name for kind in ADAPTER_KINDS)),
    ("Order of service", "", ("weight", "priority", "ttft_target", "on_token_limit")),
)
NAMES = tuple(name for _, _, names in GROUPS for name in names)


def term_groups(
    own_terms: Terms, inherited: Mapping[str, Any], form: Mapping[str, str] | None, currency: str
) -> list[FieldGroup]:
    """Return the fields of a form for terms. form: what was sent, to show it again after an error."""
    values = given_terms(own_terms)
    return [
        FieldGroup(title, hint, [_field(name, values, inherited, form, currency) for name in names])
        for title, hint, names in GROUPS
    ]


def limit_fields(limits: Limits, form: Mapping[str, str] | None, currency: str) -> list[TermField]:
    """Return the fields of a form for the limits of a key, which has none by default."""
    values = msgspec.structs.asdict(limits)
    given = {name: value for name, value in values.items() if value is not None}
    return [_field(name, given, dict.fromkeys(LIMIT_NAMES), form, currency) for name in LIMIT_NAMES]


def _field(
    name: str, values: Mapping[str, Any], inherited: Mapping[str, Any], form: Mapping[str, str] | None, currency: str
) -> TermField:
    title, hint = TITLES[name]
    value = (term_text(name, values[name]) if name in values else "") if form is None else form.get(name, "")
    unit = currency if name in MONEY else "s" if name == "ttft_target" else ""
    choices = tuple(ON_TOKEN_LIMIT.items()) if name == "on_token_limit" else ()
    return TermField(name, title, hint, value, term_text(name, inherited[name]), unit, choices)


def terms_text(values: Mapping[str, Any]) -> str:
    """Return terms for people: each with its title, such as `Concurrent requests: 4, Weight: 2`."""
    return ", ".join(f"{title_of(name)}: {term_text(name, value)}" for name, value in values.items())


def title_of(name: str) -> str:
    """Return the title of a term or of another field: `Requests per minute`."""
    return TITLES[name][0] if name in TITLES else name.replace("_", " ").capitalize()


def term_text(name: str, value: Any) -> str:
    """Return a term for people: no limit as `none`, money and bytes with their units, other numbers with their
    thousands grouped. The text is exact, and `read_terms` returns the same term for it.
    """
    if value is None or value in ((), [], {}, ""):
        return NO_LIMIT
    if isinstance(value, str | bool):
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
    if name in MONEY:
        return format_money(value)
    if name in BYTES:
        unit = next(unit for unit in reversed(UNITS) if value % UNITS[unit] == 0)
        return f"{value // UNITS[unit]:,} {unit}"
    if name == "budget_warn_at":
        return ", ".join(f"{100 * share:g} %" for share in value)
    if name == "model_limits":
        return "\n".join(f"{model}: {_limits_text(limits)}" for model, limits in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _limits_text(limits: Limits) -> str:
    values = {name: value for name, value in msgspec.structs.asdict(limits).items() if value is not None}
    return " ".join(f"{name}={exact_money(value) if name in MONEY else value}" for name, value in values.items())


def read_terms(
    form: Mapping[str, str], errors: dict[str, str], names: Collection[str] = NAMES
) -> tuple[dict[str, Any], list[str]]:
    """Return (terms that are set, terms that are left empty). Adds a message to `errors` for each wrong field."""
    values: dict[str, Any] = {}
    empty: list[str] = []
    for name in names:
        text = form.get(name, "").strip()
        if not text:
            empty.append(name)
            continue
        try:
            values[name] = _read(name, text)
        except ValueError as error:
            errors[name] = str(error)
    return values, empty


def _read(name: str, text: str) -> Any:
    if name == "on_token_limit":
        return text
    if name == "budget_warn_at":
        return _read_shares(text)
    if name == "model_limits":
        return _read_model_limits(text)
    if text.lower() == NO_LIMIT:
        return None
    if name in MONEY:
        return read_money(text)
    if name in BYTES:
        return read_bytes(text)
    if name in ("weight", "ttft_target"):
        try:
            return float(text)
        except ValueError:
            raise ValueError("Expected a number, such as 1.5.") from None
    found = re.fullmatch(r"(\d[\d,_ ]*)([kKmMgG]?)", text)
    if found is None:
        raise ValueError("Expected a whole number, such as 60,000 or 60k, or none.")
    return int(re.sub(r"\D", "", found[1])) * FACTORS[found[2].lower()]


def _read_shares(text: str) -> list[float]:
    if text.lower() == NO_LIMIT:
        return []
    words = text.replace("%", " ").replace(",", " ").split()
    if not all(re.fullmatch(r"\d{1,3}(\.\d{1,2})?", word) and 1 <= float(word) <= 100 for word in words):
        raise ValueError("Expected percentages from 1 to 100, such as 80 %, 100 %, or none.")
    return [round(float(word) / 100, 6) for word in words]


def _read_model_limits(text: str) -> dict[str, dict[str, Any]]:
    """Return the limits of each line of the field by model. Raises ValueError for people."""
    if text.lower() == NO_LIMIT:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        model, colon, rest = line.partition(":")
        limits = dict(word.partition("=")[::2] for word in rest.replace(",", " ").split())
        if not (colon and model.strip() and limits) or model.strip() in found:
            raise ValueError(f"Expected one line for each model, such as pirate: max_concurrent=2; got {line!r}.")
        unknown = sorted(limits.keys() - set(LIMIT_NAMES))
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no limit of a model, only: {', '.join(LIMIT_NAMES)}.")
        try:
            found[model.strip()] = {name: _read(name, value) for name, value in limits.items()}
        except ValueError as error:
            raise ValueError(f"{model.strip()}: {error}") from None
    return found


def read_bytes(text: str) -> int:
    """Return a number of bytes, such as `4 GiB`, `1.5 GiB` or `4g`. Raises ValueError for people."""
    found = re.fullmatch(r"(\d[\d,_ ]*(?:\.\d+)?) *([a-zA-Z]*)", text)
    units = {unit.lower(): factor for unit, factor in UNITS.items()} | FACTORS
    factor = units.get(found[2].lower()) if found is not None else None
    amount = Decimal(re.sub("[,_ ]", "", found[1])) * factor if found is not None and factor is not None else None
    if amount is None or amount != amount.to_integral_value():
        raise ValueError("Expected a size, such as 512 MiB or 4 GiB, or none.")
    return int(amount)


def read_money(text: str) -> int:
    """Return an amount in micro-units. Raises ValueError for people."""
    try:
        amount = Decimal(text.replace(",", "").strip()) * MICRO_UNITS
        if not (0 <= amount <= 10**15 and amount == amount.to_integral_value()):
            raise ValueError("Expected an amount from 0 to 1,000,000,000 of at most six decimals.")
    except DecimalException:
        raise ValueError("Expected an amount, such as 12.50.") from None
    return int(amount)
