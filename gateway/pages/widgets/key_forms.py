"""Forms that create, rotate and revoke keys, for operators and for tenants' own people."""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from aiohttp import web
from multidict import MultiDict, MultiMapping

from gateway.access.sessions import VISITOR
from gateway.api.key_manager import KeyChanges, NewKey
from gateway.api.page_guard import FORM
from gateway.api.requests.fields import read_fields
from gateway.errors import BadRequest
from gateway.pages.frame.frame import Frame
from gateway.pages.widgets.edits import Edit, merge, shown_values
from gateway.pages.widgets.form_checks import form_errors, typing_error
from gateway.pages.widgets.forms import LIMIT_NAMES, limit_fields, read_terms
from gateway.records.keys.keys import ApiKey
from gateway.records.tenants.limits import Limits

EXPIRIES = (("", "never"), ("1", "in 1 day"), ("7", "in 7 days"), ("30", "in 30 days"), ("90", "in 90 days"),
            ("365", "in 365 days"))  # fmt: skip
DONE = {"revoked": "The key is revoked.", "changed": "The key has changed."}
KEY_ID_CHARS = 16
GRACES = (("0", "at once"), ("3600", "after 1 hour"), ("86400", "after 1 day"), ("604800", "after 7 days"))


def read_new_key(form: MultiMapping[str]) -> NewKey:
    """Return the new key of `templates/key_form.html`. Raises BadRequest."""
    fields: dict[str, Any] = {"label": form.get("label", "").strip(), "scopes": form.getall("scopes", [])}
    models = form.get("allowed_models", "").replace(",", " ").split()
    fields |= {"expires_at": read_expiry(form.get("expires", "")), "allowed_models": models or None}
    return read_fields(fields | _read_limits(form)[0], NewKey)


async def edit_key(
    frame: Frame, request: web.Request, key: ApiKey, save: Callable[[KeyChanges], Awaitable[None]], then: str
) -> web.Response:
    """Return the form of a key's label and limits; with a form, save the changed fields and redirect to `then`."""
    present = {"label": key.label or ""}
    if key.tenant is not None:
        present |= {field.name: field.value for field in limit_fields(key.limits, None, frame.currency)}
    sent = request.get(FORM)
    if sent is None:
        return _edit_form(frame, request, key, Edit(MultiDict(present), {}), present, {})
    edit = merge(sent, present)
    errors = dict(edit.conflicts)
    if not errors:
        with form_errors(errors):
            changes = _read_changes(edit.fields, present)
            if changes.given():
                await save(changes)
            raise web.HTTPSeeOther(then)
    return _edit_form(frame, request, key, edit, present, errors)


def _read_changes(form: MultiMapping[str], present: Mapping[str, str]) -> KeyChanges:
    """Return the fields of `templates/key_edit.html` that differ from the key's. Raises BadRequest."""
    given = {name: form.get(name, "").strip() for name in present}
    changed = {name: text for name, text in given.items() if text != present[name].strip()}
    fields: dict[str, Any] = {"label": changed.pop("label")} if "label" in changed else {}
    values, empty = _read_limits(changed)
    return read_fields(fields | values | {name: None for name in empty if name in changed}, KeyChanges)


def _read_limits(form: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the limits that are set, and the names of the others. Raises BadRequest."""
    errors: dict[str, str] = {}
    values, empty = read_terms(form, errors, LIMIT_NAMES)
    for name, message in errors.items():
        raise BadRequest(message, param=name)
    return values, empty


def new_key_id(request: web.Request) -> str | None:
    """Return the id of the key that the request's form makes; None if the form does not fix it.

    A form has a random value `once`, and its key's id is derived from it, so that a form that is sent again makes no
    second key. The session's secret in it keeps others from taking the id.
    """
    once = request[FORM].get("once", "")
    return sha256(f"{request[VISITOR].csrf}.{once}".encode()).hexdigest()[:KEY_ID_CHARS] if once else None


def read_grace(form: MultiMapping[str]) -> int:
    """Return the seconds of `templates/key_rotate.html`. Raises BadRequest."""
    if form.get("grace", "") not in dict(GRACES):
        raise BadRequest("grace: choose one of the times.", param="grace")
    return int(form["grace"])


def _edit_form(
    frame: Frame, request: web.Request, key: ApiKey, edit: Edit, present: Mapping[str, str], errors: dict[str, str]
) -> web.Response:
    """Return the form of a key's label and limits. present: the key's values by field; errors: texts by field."""
    return frame.render(
        request,
        "key_edit.html",
        title=f"Edit {key.label or key.id}",
        status=edit.status if errors else 200,
        key=key,
        label=edit.fields.get("label", ""),
        limits=limit_fields(key.limits, edit.fields, frame.currency) if key.tenant is not None else (),
        shown=shown_values(present),
        errors=errors,
    )


def rotate_form(frame: Frame, request: web.Request, key: ApiKey, errors: dict[str, str]) -> web.Response:
    """Return the form of a rotation. errors: texts by field."""
    return frame.render(
        request,
        "key_rotate.html",
        title=f"Rotate {key.label or key.id}",
        status=(409 if "once" in errors else 400) if errors else 200,
        key=key,
        once=secrets.token_hex(8),
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
        status=(409 if "once" in errors else 400) if errors else 200,
        owner=owner,
        once=secrets.token_hex(8),
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
