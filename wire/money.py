"""Amounts of money as text. Amounts are integers in micro-units of the deployment's currency."""

MICRO_UNITS = 1_000_000


def format_money(micro_units: int, currency: str = "") -> str:
    """Return the exact amount for people: `0.00`, `1,212.50`, `0.000001`, or with its currency `12.50 EUR`."""
    whole, part = divmod(micro_units, MICRO_UNITS)
    return f"{whole:,}.{f'{part:06}'.rstrip('0'):0<2} {currency}".rstrip()


def exact_money(micro_units: int) -> str:
    """Return the exact amount for programs: a decimal such as `0.00`, `1212.50` or `0.000001`."""
    return format_money(micro_units).replace(",", "")
