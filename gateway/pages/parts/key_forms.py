"""Forms that create, rotate and revoke keys, for operators and for tenants' own people."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web
from multidict import MultiMapping

from gateway.access.page_guard import FORM
from gateway.api.key_manager import KeyChanges, NewKey
from gateway.api.requests.fields import read_fields
from gateway.errors import BadRequest
from gateway.pages.frame.frame import Frame
from gateway.pages.parts.answers import typing_error
from gateway.pages.parts.forms import LIMIT_NAMES, limit_fields, read_terms
from gateway.records.keys.keys import ApiKey
from gateway.records.tenants.limits import Limits

EXPIRIES = (("", "never"), ("1", "in 1 day"), ("7", "in 7 days"), ("30", "in 30 days"), ("90", "in 90 days"),
            ("365", "in 365 days"))  # fmt: skip
DONE = {"revoked": "The key is revoked.", "changed": "The key has changed."}
GRACES = (("0", "at once"), ("3600", "after 1 hour"), ("86400", "after 1 day"), ("604800", "after 7 days"))


def read_new_key(form: MultiMapping[str]) -> NewKey:
    """Return the new key of `templates/key_form.html`. Raises BadRequest."""
    fields: dict[str, Any] = {"label": form.get("label", "").strip(), "scopes": form.getall("scopes", [])}
    models = form.get("allowed_models", "").replace(",", " ").split()
    fields |= {"expires_at": read_expiry(form.get("expires", "")), "allowed_models": models or None}
    return read_fields(fields | _read_limits(form)[0], NewKey)


def read_key_changes(form: MultiMapping[str], key: ApiKey) -> KeyChanges:
    """Return the changes of `templates/key_edit.html`. Raises BadRequest."""
    fields: dict[str, Any] = {"label": form.get("label", "").strip()}
    if key.tenant is not None:
        values, empty = _read_limits(form)
        fields |= values | dict.fromkeys(empty)
    return read_fields(fields, KeyChanges)


def _read_limits(form: MultiMapping[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the limits that are set, and the names of the others. Raises BadRequest."""
    errors: dict[str, str] = {}
    values, empty = read_terms(form, errors, LIMIT_NAMES)
    for name, message in errors.items():
        raise BadRequest(message, param=name)
    return values, empty


def read_grace(form: MultiMapping[str]) -> int:
    """Return the seconds of `templates/key_rotate.html`. Raises BadRequest."""
    if form.get("grace", "") not in dict(GRACES):
        raise BadRequest("grace: choose one of the times.", param="grace")
    return int(form["grace"])


def edit_form(frame: Frame, request: web.Request, key: ApiKey, errors: dict[str, str]) -> web.Response:
    """Return the form of a key's label and limits. errors: texts by field."""
    form = request.get(FORM)
    return frame.render(
        request,
        "key_edit.html",
        title=f"Edit {key.label or key.id}",
        status=400 if errors else 200,
        key=key,
        label=key.label if form is None else form.get("label", ""),
        limits=limit_fields(key.limits, form, frame.currency) if key.tenant is not None else (),
        errors=errors,
    )


def rotate_form(frame: Frame, request: web.Request, key: ApiKey, errors: dict[str, str]) -> web.Response:
    """Return the form of a rotation. errors: texts by field."""
    return frame.render(
        request,
        "key_rotate.html",
        title=f"Rotate {key.label or key.id}",
        status=400 if errors else 200,
        key=key,
        graces=GRACES,
        errors=errors,
    )


def key_form(
    frame: Frame,
    request: web.Request,
    errors: dict[str, str],
    *,
    title: str,
    cancel: str,
    owner: str | None = None,
    scopes: Sequence[tuple[str, bool]] = (),
    roles: Sequence[tuple[str, str]] = (),
) -> web.Response:
    """Return the form of a new key. owner: the tenant, for operators. scopes: each with whether it is chosen.

    A key without scopes is an admin's, which has no limits.
    """
    form = request.get(FORM)
    return frame.render(
        request,
        "key_form.html",
        title=title,
        status=400 if errors else 200,
        owner=owner,
        cancel=cancel,
        scopes=scopes,
        roles=roles,
        expiries=EXPIRIES,
        values=form or {},
        limits=limit_fields(Limits(), form, frame.currency) if scopes else (),
        errors=errors,
    )


def revoke_form(frame: Frame, request: web.Request, name: str, text: str, cancel: str) -> web.Response:
    """Return the page that asks for a key's name before it is revoked. text: the effects."""
    return frame.confirm(
        request,
        title=f"Revoke {name}",
        name=name,
        text=text,
        button="Revoke",
        cancel=cancel,
        error=typing_error(request, name),
    )


def read_expiry(days: str) -> datetime | None:
    """Return the end of a new key's life. days: a value in EXPIRIES. Raises BadRequest."""
    if days not in dict(EXPIRIES):
        raise BadRequest("expires: choose one of the times.", param="expires")
    return datetime.now(UTC) + timedelta(days=int(days)) if days else None
