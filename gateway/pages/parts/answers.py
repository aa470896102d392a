"""Answers to forms: whether a person confirmed an act by typing its name, and the field that an error is about."""

from aiohttp import web

from gateway.access.page_guard import FORM
from gateway.errors import GatewayError


def is_confirmed(request: web.Request, name: str) -> bool:
    """Return whether the request's form has the name of the thing to act on."""
    form = request.get(FORM)
    return form is not None and form.get("typed", "").strip() == name


def typing_error(request: web.Request, name: str) -> str | None:
    """Return the error of a form that does not have the name; None without a form."""
    return None if request.get(FORM) is None else f"Type {name} to confirm."


def error_field(error: GatewayError) -> str:
    """Return the form's field that an error is about, "" if it is about none."""
    return (error.param or "").split("[")[0]
