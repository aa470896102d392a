"""Values of JSON texts, as error messages show them."""

import json
from typing import Any

_MOST_CHARACTERS = 80


def as_json(value: Any) -> str:
    """Return a value as JSON spells it (`null`, `true`, `"text"`), cut off where it is long."""
    return json.dumps(value, ensure_ascii=False, default=str)[:_MOST_CHARACTERS]
