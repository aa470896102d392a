"""Fields of forms: terms of tenants and plans, and amounts of money, as people write them."""

import re
from collections.abc import Mapping
from decimal import Decimal, DecimalException
from typing import Any, NamedTuple

from gateway.quota.kinds import KINDS
from gateway.records.money.prices import MICRO_UNITS, format_money
from gateway.records.tenants.terms import Terms, given_terms

NO_LIMIT = "none"
MONEY = frozenset(kind.name for kind in KINDS if kind.takes == "cost")
# Suffixes of whole numbers.
FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


class TermField(NamedTuple):
    """Field of a form. value: the own term as text, empty if inherited. inherited: the value without an own term."""

    name: str
    title: str
    hint: str
    value: str
    inherited: str
    unit: str


OTHERS = (
    ("weight", "Weight", "Share of a busy engine, relative to other tenants."),
    ("priority", "Priority", "From 0, served first, to 9, refused first under overload."),
    ("ttft_target", "Time to first token", "Wanted time in seconds, or none."),
    ("on_token_limit", "At a token limit", "refuse or shorten."),
)
NAMES = (*(kind.name for kind in KINDS), *(name for name, _, _ in OTHERS))


def term_fields(
    own: Terms, inherited: Mapping[str, Any], form: Mapping[str, str] | None, currency: str
) -> list[TermField]:
    """Return the fields of a form for terms. form: what was sent, to show it again after an error."""
    given = given_terms(own)
    titles = [(kind.name, kind.help, "") for kind in KINDS] + list(OTHERS)
    fields = []
    for name, title, hint in titles:
        value = term_text(name, given[name]) if name in given else ""
        value = value if form is None else form.get(name, "")
        unit = currency if name in MONEY else "s" if name == "ttft_target" else ""
        fields.append(TermField(name, title, hint, value, term_text(name, inherited[name]), unit))
    return fields


def term_text(name: str, value: Any) -> str:
    """Return a term for people: no limit as `none`, money in units, other numbers with their thousands grouped."""
    if value is None:
        return NO_LIMIT
    if name in MONEY:
        return format_money(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def read_terms(form: Mapping[str, str], errors: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return (terms that are set, terms that are left empty). Adds a message to `errors` for each wrong field."""
    values: dict[str, Any] = {}
    empty: list[str] = []
    for name in NAMES:
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
    if text.lower() == NO_LIMIT:
        return None
    if name in MONEY:
        return read_money(text)
    if name in ("weight", "ttft_target"):
        try:
            return float(text)
        except ValueError:
            raise ValueError("Expected a number, such as 1.5.") from None
    found = re.fullmatch(r"(\d[\d,_ ]*)([kKmMgG]?)", text)
    if found is None:
        raise ValueError("Expected a whole number, such as 60,000 or 60k, or none.")
    return int(re.sub(r"\D", "", found[1])) * FACTORS[found[2].lower()]


def read_money(text: str) -> int:
    """Return an amount in micro-units. Raises ValueError for people."""
    try:
        amount = Decimal(text.replace(",", "").strip()) * MICRO_UNITS
        if not (0 <= amount <= 10**15 and amount == amount.to_integral_value()):
            raise ValueError("Expected an amount from 0 to 1,000,000,000 of at most six decimals.")
    except DecimalException:
        raise ValueError("Expected an amount, such as 12.50.") from None
    return int(amount)
