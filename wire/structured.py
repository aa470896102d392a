"""Structured output requests: translation of OpenAI's `response_format` and vLLM's forms into one GrammarSpec.

Checks only shape and size and needs no grammar library, because the gateway reads requests too.
engine/structured/compiler.py decides whether a grammar compiles.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from wire.errors import BadRequest

Kind = Literal["json", "regex", "choice", "grammar"]

KINDS: tuple[Kind, ...] = ("json", "regex", "choice", "grammar")
MAX_SPEC_BYTES = 64 << 10
# Compiling a regular expression takes time and memory quadratic in its length: `.*` repeated 2,000 times takes 0.8 s
# and 100 MiB, 10,000 times 20 s and 2 GiB. A grammar may contain many.
MAX_REGEX_BYTES = 4 << 10
MAX_GRAMMAR_BYTES = 16 << 10
MAX_CHOICES = 1000
ANY_OBJECT = '{"type":"object"}'

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """An output constraint.

    `text`: a JSON schema, a regular expression, a JSON list of strings, or a Lark or GBNF grammar. lenient: drop schema
    keywords that cannot be enforced instead of refusing them. param: the request field to name in errors.
    """

    kind: Kind
    text: str
    lenient: bool = False
    param: str = field(default="", compare=False)


def read_spec(response_format: Any, structured_outputs: Any, guided: Mapping[Kind, Any]) -> GrammarSpec | None:
    """Return the one requested constraint, or None. `guided`: vLLM's `guided_*` fields by kind.

    Raises BadRequest naming the field if the constraint has an unknown form, is too large, or is not the only one.
    """
    found = [_read(kind, value, f"guided_{kind}") for kind, value in guided.items() if value is not None]
    if structured_outputs is not None:
        found.append(_read_structured_outputs(structured_outputs))
    if response_format is not None and (spec := _read_response_format(response_format)) is not None:
        found.append(spec)
    if len(found) > 1:
        raise BadRequest.of(found[1].param, f"cannot be combined with {found[0].param}.")
    return found[0] if found else None


def _read_response_format(value: Any) -> GrammarSpec | None:
    at = "response_format"
    kind = _object(value, at).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec("json", ANY_OBJECT, param=at)
    if kind != "json_schema":
        raise BadRequest.of(f"{at}.type", f"expected text, json_object or json_schema, got {_short(kind)}.")
    at = f"{at}.json_schema"
    wrapper = _object(value.get("json_schema"), at)
    name = wrapper.get("name")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise BadRequest.of(f"{at}.name", f"expected 1 to 64 letters, digits, _ and -, got {_short(name)}.")
    strict = wrapper.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise BadRequest.of(f"{at}.strict", f"expected true or false, got {_short(strict)}.")
    description = wrapper.get("description")
    if description is not None and not isinstance(description, str):
        raise BadRequest.of(f"{at}.description", f"expected a string, got {_short(description)}.")
    schema = _object(wrapper.get("schema"), f"{at}.schema")
    return GrammarSpec("json", _text(schema, f"{at}.schema"), lenient=not strict, param=f"{at}.schema")


def _read_structured_outputs(value: Any) -> GrammarSpec:
    at = "structured_outputs"
    known: tuple[str, ...] = (*KINDS, "json_object")
    given = {key: item for key, item in _object(value, at).items() if item is not None and item is not False}
    if unknown := given.keys() - set(known):
        raise BadRequest.of(f"{at}.{min(unknown)[:64]}", f"not served; {at} takes one of {', '.join(known)}.")
    if len(given) != 1:
        raise BadRequest.of(at, f"expected exactly one of {', '.join(known)}, got {len(given)}.")
    for kind in KINDS:
        if kind in given:
            return _read(kind, given[kind], f"{at}.{kind}")
    if given["json_object"] is not True:
        raise BadRequest.of(f"{at}.json_object", f"expected true or false, got {_short(given['json_object'])}.")
    return GrammarSpec("json", ANY_OBJECT, param=f"{at}.json_object")


def _read(kind: Kind, value: Any, at: str) -> GrammarSpec:
    if kind == "json":
        if isinstance(value, str):
            _check_size(value, at)
            try:
                value = msgspec.json.decode(value)
            except (msgspec.DecodeError, RecursionError):
                raise BadRequest.of(at, "expected a JSON schema; the string is not valid JSON.") from None
        return GrammarSpec(kind, _text(_object(value, at), at), param=at)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(c, str) and c for c in value):
            raise BadRequest.of(at, "expected a list of one or more non-empty strings.")
        if len(value) > MAX_CHOICES:
            raise BadRequest.of(at, f"expected at most {MAX_CHOICES} strings, got {len(value)}.")
        return GrammarSpec(kind, _text(value, at), param=at)
    if not isinstance(value, str) or not value:
        raise BadRequest.of(at, f"expected a non-empty string, got {_short(value)}.")
    _check_size(value, at, MAX_REGEX_BYTES if kind == "regex" else MAX_GRAMMAR_BYTES)
    return GrammarSpec(kind, value, param=at)


def _object(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest.of(at, f"expected an object, got {_short(value)}.")
    return value


def _text(value: Any, at: str) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (RecursionError, UnicodeEncodeError):
        raise BadRequest.of(at, "expected valid Unicode that is not nested too deeply.") from None
    _check_size(text, at)
    return text


def _check_size(text: str, at: str, limit: int = MAX_SPEC_BYTES) -> None:
    # Compare characters first, so that a huge string is not encoded just to be measured.
    size = len(text) if len(text) > limit else len(text.encode("utf-8", "surrogatepass"))
    if size > limit:
        raise BadRequest.of(at, f"expected at most {limit} bytes, got {size}.")


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    return repr(value[:40]) if isinstance(value, str) else type(value).__name__
