"""Random small JSON schemas and a validator: the reference of the property tests for structured output."""

from typing import Any

from hypothesis import strategies as st

NAMES = st.text('abc "\\é', min_size=1, max_size=3)
SCALARS = st.one_of(
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 4)),
    st.builds(lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)},
              st.integers(-120, 120), st.integers(-120, 120)),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda values: {"enum": values}, st.lists(st.one_of(NAMES, st.integers(0, 9)), min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, st.one_of(NAMES, st.none(), st.booleans())),
)  # fmt: skip


def _object(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
    required = list(properties)[:num_required]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(items: dict[str, Any], a: int, b: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": min(a, b), "maxItems": max(a, b)}


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), st.integers(0, 3)),
        st.builds(_array, inner, st.integers(0, 2), st.integers(0, 2)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)

_TYPES = {"string": str, "integer": int, "boolean": bool, "null": type(None), "object": dict, "array": list}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Check a value by JSON Schema's rules for the keywords above. A bool is not an integer."""
    if "anyOf" in schema:
        return any(fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(choice) and value == choice for choice in schema["enum"])
    if "const" in schema:
        return type(value) is type(schema["const"]) and value == schema["const"]
    if type(value) is not _TYPES[schema["type"]]:
        return False
    if isinstance(value, str):
        return len(value) <= schema.get("maxLength", len(value))
    if isinstance(value, dict):
        properties = schema["properties"]
        known = all(name in properties and fits(item, properties[name]) for name, item in value.items())
        return known and all(name in value for name in schema.get("required", ()))
    if isinstance(value, list):
        return schema["minItems"] <= len(value) <= schema["maxItems"] and all(fits(v, schema["items"]) for v in value)
    if type(value) is int:
        return schema["minimum"] <= value <= schema["maximum"]
    return True
