"""Checks of forms: the typed name that confirms an act, and the field that caused an error."""

from aiohttp import web

from gateway.access.page_guard import FORM
from gateway.errors import GatewayError


def is_confirmed(request: web.Request, name: str) -> bool:
    """Return whether the request's form has the name of the thing to act on."""
    form = request.get(FORM)
    return form is not None and form.get("typed", "").strip() == name


def typing_error(request: web.Request, name: str) -> str | None:
    """Return the error of a form without the name; None if no form was sent."""
    return None if request.get(FORM) is None else f"Type {name} to confirm."


def error_text(error: GatewayError) -> str:
    """Return an error's message for its field in a form: without the field's API name in front."""
    text = error.message.removeprefix(f"{error_field(error)}: ")
    return text[:1].upper() + text[1:]


def error_field(error: GatewayError) -> str:
    """Return the form's field that an error is about, "" if it is about none."""
    return (error.param or "").split("[")[0]
