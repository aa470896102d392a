"""Environment of chat templates, and the joining of their pieces, which stops at a text that is too long."""

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wire.text.lower_bound import LeastCount

# Template variable: the maximum number of characters of the rendered text, None for no limit.
ROOM = "_room"


class NoRoom(Exception):
    """A rendered text that has more tokens than allowed."""


class _GenerationBlock(Extension):
    """The tag `{% generation %}`, which marks the assistant's words for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: "jinja2.parser.Parser") -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment in which chat templates run."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def join(pieces: Iterable[str], room: int | None, least: LeastCount | None = None) -> str:
    """Join pieces of at most `room` characters together. Raises NoRoom before producing more.

    least: count of the tokens that the pieces have at least; NoRoom is raised once they are too many.
    """
    joined, length = [], 0
    for piece in pieces:
        joined.append(piece)
        length += len(piece)
        if (room is not None and length > room) or (least is not None and least.add(piece)):
            raise NoRoom
    return "".join(joined)


@jinja2.pass_context
def _to_json(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # Indentation multiplies the size of a deep value, so it is encoded in pieces.
    return encoder.encode(value) if indent is None else join(encoder.iterencode(value), context.get(ROOM))
