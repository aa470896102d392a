"""Checks of forms: the typed name that confirms an act, and the fields that caused errors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from aiohttp import web

from gateway.api.page_guard import FORM
from gateway.api.requests.fields import read_fields
from gateway.errors import BadRequest, Changed, GatewayError
from gateway.pages.frame.errors import TEMPORARY
from gateway.pages.frame.filters import inert

T = TypeVar("T")


def is_confirmed(request: web.Request, name: str) -> bool:
    """Return whether the request's form has the name of the thing to act on, as it is stored or as pages show it."""
    form = request.get(FORM)
    return form is not None and form.get("typed", "").strip() in (name, inert(name))


def typing_error(request: web.Request, name: str) -> str | None:
    """Return the error of a form without the name; None if no form was sent."""
    return None if request.get(FORM) is None else f"Type {name} to confirm."


def read_form(form: Mapping[str, Any], kind: type[T], errors: dict[str, str]) -> T | None:
    """Return a form's fields as `kind`; None if any is wrong, with a text for each such field in `errors`."""
    left = dict(form)
    while True:
        try:
            found = read_fields(left, kind)
        except BadRequest as error:
            name = error_field(error)
            errors[name] = error_text(error)
            if name not in left:
                return None
            # The other fields are read without it, so that their errors are found too.
            del left[name]
        else:
            return found if len(left) == len(form) else None


@contextmanager
def form_errors(errors: dict[str, str]) -> Iterator[None]:
    """Put the text of an error about the form into `errors`, under its field.

    A fault or a rate limit is raised instead, so that its page has its own status, text and `Retry-After`; and Changed,
    for `again_if_changed`.
    """
    try:
        yield
    except GatewayError as error:
        if error.status in TEMPORARY or isinstance(error, Changed):
            raise
        errors[error_field(error)] = error_text(error)


def error_text(error: GatewayError) -> str:
    """Return an error's message for its field in a form: without the field's API name in front."""
    text = error.message.removeprefix(f"{error_field(error)}: ")
    return text[:1].upper() + text[1:]


def error_field(error: GatewayError) -> str:
    """Return the form's field that an error is about, "" if it is about none."""
    return (error.param or "").split("[")[0].split(".")[0]
