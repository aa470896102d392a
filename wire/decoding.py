"""Decoder of JSON bodies into checked structs; error messages name the field.

The structs' annotations hold types and ranges. Each struct's `check` holds the rules that annotations cannot express.
"""

import re
from threading import Lock
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from wire.errors import BadRequest

# A body of at most QUICK_WORK is rendered and counted within a millisecond. A letter or a space counts 1 and takes at
# most 0.6 µs; any other byte, such as a digit, may be a token of its own, takes up to 1.9 µs and counts OTHER_WORK.
QUICK_WORK, OTHER_WORK = 1600, 4
_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ \n"
# Fields that a chat template may write many times, and the escape that can spell their names differently.
_REPEATED = (b'"tools"', b'"chat_template_kwargs"', b"\\u")


def is_quick(raw: bytes) -> bool:
    """Return whether a body's prompts can be rendered and counted on the event loop."""
    if len(raw) > QUICK_WORK or any(field in raw for field in _REPEATED):
        return False
    return len(raw) + (OTHER_WORK - 1) * len(raw.translate(None, _LETTERS)) <= QUICK_WORK


class Checked(Protocol):
    def check(self) -> None:
        """Raise BadRequest for the first field that breaks a rule which its annotation cannot express."""


RequestT = TypeVar("RequestT", bound=Checked)

# JSON's names for the Python types in msgspec's messages, and the words for its bounds.
TYPE_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_LIMIT = re.compile(r"Expected `(\w+)` (of length )?(<=|>=|<|>) (\S+)")
BOUND_WORDS = {"<=": "at most", ">=": "at least", "<": "below", ">": "above"}
UNITS = {"str": "characters", "array": "entries", "object": "entries"}

_decoders: dict[type, "msgspec.json.Decoder[Any]"] = {}
_building = Lock()


def decode(kind: type[RequestT], body: bytes) -> RequestT:
    """Decode a JSON body and check it. Raises BadRequest."""
    try:
        request = _decoder(kind).decode(body)
    except msgspec.ValidationError as exc:
        raise _explain(str(exc), kind, body) from None
    except msgspec.DecodeError as exc:
        raise BadRequest(None, f"The body is not valid JSON: {exc}.") from None
    except UnicodeDecodeError:
        raise BadRequest(None, "The body is not valid JSON: it is not UTF-8.") from None
    except RecursionError:
        raise BadRequest(None, "The body is not valid JSON: it is nested too deeply.") from None
    request.check()
    return request


def refuse(request: Struct, *fields: str, allowed: tuple[Any, ...] = ()) -> None:
    """Raise BadRequest for any given field whose value is not in `allowed`."""
    for field in fields:
        value = getattr(request, field)
        if value is not None and value not in allowed:
            raise BadRequest(field, f"{field}: is not served by this engine.", "unsupported_parameter")


def _decoder(kind: type[RequestT]) -> "msgspec.json.Decoder[RequestT]":
    """Return the decoder of a kind, built by one thread while others wait.

    msgspec reads a struct's annotations into a table at its first use, and runs Python code meanwhile. A second thread
    that decodes by the unfinished table ends the process with a segmentation fault.
    """
    if (found := _decoders.get(kind)) is None:
        with _building:
            found = _decoders.get(kind) or _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


def _explain(error: str, kind: type, body: bytes) -> BadRequest:
    """Turn msgspec's "Expected `int | null`, got `str` - at `$.max_tokens`" into words that name the field."""
    what, _, at = error.partition(" - at `$")
    path = at.rstrip("`").lstrip(".")
    param = path.removesuffix("[...]")
    if missing := re.search(r"missing required field `(\w+)`", what):
        param = f"{param}.{missing[1]}".lstrip(".")
        return BadRequest(param, f"{param}: is required.")
    if limit := _LIMIT.fullmatch(what):
        return BadRequest(param, _out_of_range(param, limit, _types_at(kind, path), body))
    if expected := re.fullmatch(r"Expected `([^`]+)`, got `([^`]+)`", what):
        kinds = [TYPE_WORDS.get(kind, kind) for kind in expected[1].split(" | ") if kind != "null"]
        what = f"expected {' or '.join(kinds)}, got {TYPE_WORDS.get(expected[2], expected[2])}"
    elif what.startswith("Invalid enum value"):
        what = f"{what[0].lower()}{what[1:120]}{choices(kind, path)}"
    elif pattern := re.fullmatch(r"Expected `str` matching regex '(.*?)(\(\?!.*\))?'", what):
        what = f"expected a string that matches {pattern[1]}"
    return BadRequest(param or None, f"{param or 'the body'}: {what[0].lower()}{what[1:]}.")


def _out_of_range(param: str, limit: re.Match[str], types: list[msgspec.inspect.Type], body: bytes) -> str:
    """Return a message with the number's whole range, and the given value for a field at the body's top level."""
    name, of_length, sign, bound = limit.groups()
    if of_length:
        return f"{param}: expected {BOUND_WORDS[sign]} {bound} {UNITS[name]}."
    for part in types:
        if isinstance(part, msgspec.inspect.IntType | msgspec.inspect.FloatType):
            low = f"at least {_plain(part.ge)}" if part.ge is not None else ""
            low = f"a number above {_plain(part.gt)}" if part.gt is not None else low
            high = f"at most {_plain(part.le)}" if part.le is not None else ""
            if part.ge is not None and high:
                wanted = f"a number between {_plain(part.ge)} and {_plain(part.le)}"
            else:
                wanted = " and ".join(filter(None, (low, high)))
            return f"{param}: expected {wanted}{_given(param, body)}."
    return f"{param}: expected {TYPE_WORDS[name]} {BOUND_WORDS[sign]} {bound}."


def choices(kind: type, path: str) -> str:
    """Return the end of a message with the values that are allowed at a path, see `_types_at`; "" if they are many."""
    literals = [part for part in _types_at(kind, path) if isinstance(part, msgspec.inspect.LiteralType)]
    return f"; expected one of {', '.join(map(str, literals[0].values))}" if literals else ""


def _types_at(kind: type, path: str) -> list[msgspec.inspect.Type]:
    """Return the types allowed at a path such as `tools[0].type` or `logit_bias[...]`."""
    types = [msgspec.inspect.type_info(kind)]
    for step in re.findall(r"\[[^\]]*\]|\w+", path):
        types = [inner for outer in types for inner in _inside(outer, step)]
    return types


def _inside(outer: msgspec.inspect.Type, step: str) -> list[msgspec.inspect.Type]:
    found: list[msgspec.inspect.Type] = []
    match outer:
        case msgspec.inspect.StructType():
            found = [field.type for field in outer.fields if field.encode_name == step]
        case msgspec.inspect.ListType():
            found = [outer.item_type]
        case msgspec.inspect.DictType():
            found = [outer.value_type]
    return [part for one in found for part in (one.types if isinstance(one, msgspec.inspect.UnionType) else (one,))]


def _given(param: str, body: bytes) -> str:
    # The decoder stopped at this field, so the rest of the body may not be JSON.
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])[param]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return ""
    return f", got {bytes(raw)[:40].decode('utf-8', 'replace')}"


def _plain(bound: float | None) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
