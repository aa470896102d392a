"""Fields of a price in forms, in units of money per million tokens."""

from collections.abc import Mapping

from gateway.pages.widgets.forms import read_money

AMOUNTS = (("input", "Input"), ("output", "Output"), ("cached", "Cached"))


def read_price(form: Mapping[str, str], prefix: str, errors: dict[str, str]) -> dict[str, int]:
    """Return the amounts of a price; empty if all fields are. Adds a message to `errors` for each wrong field."""
    texts = {name: form.get(prefix + name, "").strip() for name, _ in AMOUNTS}
    price = {}
    if not any(texts.values()) and prefix:
        return {}
    for name, text in texts.items():
        if not text and name == "cached":
            continue
        try:
            price[name] = read_money(text)
            if price[name] > 10**9:
                raise ValueError("Expected at most 1,000 per million tokens.")
        except ValueError as error:
            errors[prefix + name] = str(error)
    return price
