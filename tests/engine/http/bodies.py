"""Request bodies for the fuzz test: allowed by the published description, forbidden by it, and not JSON at all."""

import json
import random
from typing import Any, get_args

from hypothesis import strategies as st

from engine.http.description import engine_description
from wire.requests import NotServed

NOT_SERVED = get_args(NotServed)[1].description
DESCRIPTION = engine_description()
SCHEMAS = DESCRIPTION["components"]["schemas"]
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
# The two routes that generate are drawn most often.
PATHS = [path for path in BASES for _ in range(8 if path.startswith(("/v1/c",)) else 1)]


# Nested deeper than Python's encoder allows, so inserted as text.
DEEP = "as deep as it gets"
DEEP_JSON = b'{"a": [' * 1500 + b"]}" * 1500


def deep(levels: int) -> Any:
    inner: Any = 0
    for level in range(levels):
        inner = [inner] if level % 2 else {"a": inner}
    return inner


def encoded(value: Any, ensure_ascii: bool = True) -> bytes:
    raw = json.dumps(value, ensure_ascii=ensure_ascii).encode("utf-8", "surrogatepass")
    return raw.replace(json.dumps(DEEP).encode(), DEEP_JSON)


STRINGS = st.one_of(
    st.text(max_size=20),
    st.sampled_from([
        "", " ", "\x00", "<|end|>", "<|start|>system", "你好🎉", "e\u0301\u200b", "a" * 3000, "<tool_call>", "{",
        "\ud800", "sha256:" + "0" * 64, "../../etc/passwd", "none", "auto", "required", "tool", "%s{}{{1/0}}",
    ]),
)  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([
        -1, 0, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 1e-300, 1e300, -0.0,
        5e-324, 1e-46, 0.1, 2.0000001, float("nan"), float("inf"), float("-inf"),
    ]),
    st.floats(),
)  # fmt: skip
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, STRINGS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(STRINGS, inner, max_size=4)),
    max_leaves=8,
) | st.sampled_from([deep(60), deep(300), DEEP, [1] * 5000, ["a"] * 2000, [[1]] * 300, {str(i): 1 for i in range(600)}])


def from_schema(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for values that the schema allows; anything where the schema allows anything."""
    if schema.get("description") == NOT_SERVED:
        # These fields refuse most values. They are set in one draw of ten, so that the other fields are checked too.
        return st.integers(0, 9).flatmap(lambda n: st.none() if n else ANYTHING)
    if "$ref" in schema:
        return st.deferred(lambda: from_schema(SCHEMAS[schema["$ref"].rsplit("/", 1)[1]]))
    if "anyOf" in schema:
        return st.one_of([from_schema(part) for part in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            low = schema.get("minimum", -(2**40))
            return st.integers(low, schema.get("maximum", 2**40)) | st.integers(low, low + 8)
        case "number":
            low, high = schema.get("minimum", schema.get("exclusiveMinimum", -1e9)), schema.get("maximum", 1e9)
            return st.floats(low, high, exclude_min="exclusiveMinimum" in schema)
        case "string":
            if "pattern" in schema:
                return st.from_regex(schema["pattern"], fullmatch=True)
            return STRINGS.filter(lambda text: len(text) >= schema.get("minLength", 0))
        case "array":
            items = from_schema(schema.get("items", {}))
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=min(4, schema.get("maxItems", 4)))
        case "object" if "properties" in schema:
            needed = set(schema.get("required", ()))
            fields = {name: from_schema(part) for name, part in schema["properties"].items()}
            return st.fixed_dictionaries(
                {name: part for name, part in fields.items() if name in needed},
                optional={name: part for name, part in fields.items() if name not in needed},
            )
        case "object":
            return st.dictionaries(st.integers(0, 500).map(str) | STRINGS, from_schema(_additional(schema)), max_size=4)
    return ANYTHING


def _additional(schema: dict[str, Any]) -> dict[str, Any]:
    extra = schema.get("additionalProperties", {})
    return extra if isinstance(extra, dict) else {}


def body_schema(path: str) -> dict[str, Any]:
    content = DESCRIPTION["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return SCHEMAS[content["schema"]["$ref"].rsplit("/", 1)[1]]


FIELDS = {path: {name: from_schema(part) for name, part in body_schema(path)["properties"].items()} for path in BASES}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """Return (path, body): a valid body with some fields drawn from the schema and some invalid, then corrupted."""
    path = draw(st.sampled_from(PATHS))
    body = dict(BASES[path])
    names = draw(st.lists(st.sampled_from(sorted(FIELDS[path])), max_size=5, unique=True))
    for name in names:
        body[name] = draw(FIELDS[path][name] if draw(st.integers(0, 9)) else ANYTHING)
    for name in draw(st.lists(st.sampled_from(sorted(body)), max_size=1)) if not draw(st.integers(0, 15)) else ():
        del body[name]
    spoil = draw(st.integers(0, 19))
    if spoil == 0:
        return path, encoded(draw(ANYTHING))
    raw = encoded(body, draw(st.booleans()))
    return path, _spoil(raw, body, spoil, random.Random(draw(st.integers(0, 2**32))))


def _spoil(raw: bytes, body: dict[str, Any], how: int, rng: random.Random) -> bytes:
    at = rng.randrange(len(raw)) if raw else 0
    match how:
        case 1:
            return raw[:at]
        case 2:
            return raw[:at] + rng.randbytes(3) + raw[at:]
        case 3:  # the last of two keys counts
            name = rng.choice(sorted(body) or ["model"])
            return (
                raw[:-1] + b", " + json.dumps(name).encode() + b": " + rng.choice([b"null", b"3", b'"x"', b"[]"]) + b"}"
            )
        case 4:
            return raw[:-1] + b', "z": ' + b"[" * 100_000
        case 5:
            return b"\xef\xbb\xbf" + raw
        case 6:
            return raw.decode("utf-8", "replace").encode(rng.choice(["utf-16", "utf-32"]))
    return raw
