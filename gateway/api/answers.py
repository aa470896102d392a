"""Structs of answers that are made from records."""

import inspect
from typing import Any, get_type_hints

from msgspec import defstruct


def row_struct(name: str, row_type: type[tuple[Any, ...]], **types: Any) -> Any:
    """Return the struct of a named tuple in an answer: an object with its fields.

    types: other types of its fields, and types of further fields.
    """
    fields = get_type_hints(row_type, include_extras=True) | types
    return defstruct(name, fields.items(), frozen=True, kw_only=True, namespace={"__doc__": inspect.getdoc(row_type)})
