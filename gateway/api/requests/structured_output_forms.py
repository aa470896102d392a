"""Structured output forms of requests, and refusals of new ones on behalf of the engines.

An engine limits each tenant's CPU time for compiling new forms. Passing such a refusal on costs this process some 10 ms
(parsing, reserving, sending), and clients that ignore `Retry-After` cause 40 a second. After one refusal the gateway
therefore refuses the tenant's new forms itself, before it parses the body. Forms that an engine has served to the
tenant still pass, because the engine may have them compiled. Every PROBE_SECONDS one new form passes, so that an engine
that serves it ends the refusals early.
"""

import hashlib
import math
import time
from dataclasses import dataclass, field
from functools import partial

import msgspec
from aiohttp import web

from gateway.api.requests.memory import BodyShare
from gateway.errors import EngineShareUsed
from wire.bounded_dict import BoundedDict

# The form of a body that has one.
FORM = web.RequestKey("form", bytes)

# An engine keeps 16 compiled forms of a tenant (engine/core/grammars.py).
MAX_KNOWN = 16
MAX_TENANTS = 1000
# Interval at which a new form passes during a refusal, and the time allowed for its answer before the next one passes.
PROBE_SECONDS, ANSWER_SECONDS = 5.0, 1.0
# A longer body is parsed on a thread, and only during a refusal, so the forms of long bodies are not recorded before.
INLINE_BYTES = 2**18
# A body that contains none of these texts has no form, unless it escapes the fields' names.
_MARKS = (b'"response_format"', b'"structured_outputs"', b'"guided_', b'"tool_choice"')
# Values of `tool_choice` that need no form.
_NULL = b"null"
_FREE_CHOICES = (_NULL, b'"auto"', b'"none"')


class _Fields(msgspec.Struct):
    """The fields of a body that decide its form, still encoded."""

    response_format: msgspec.Raw = msgspec.Raw(_NULL)
    structured_outputs: msgspec.Raw = msgspec.Raw(_NULL)
    guided_json: msgspec.Raw = msgspec.Raw(_NULL)
    guided_regex: msgspec.Raw = msgspec.Raw(_NULL)
    guided_choice: msgspec.Raw = msgspec.Raw(_NULL)
    guided_grammar: msgspec.Raw = msgspec.Raw(_NULL)
    tool_choice: msgspec.Raw = msgspec.Raw(_NULL)
    tools: msgspec.Raw = msgspec.Raw(_NULL)


class _Typed(msgspec.Struct):
    type: str = ""


_FREE_TEXT = _Typed("text")
# Built here, because threads use them: see `wire.decoding`.
_DECODER, _FORMAT_DECODER = msgspec.json.Decoder(_Fields), msgspec.json.Decoder(_Typed | None)


def form_of(raw: bytes) -> bytes | None:
    """Return a hash of the body's structured output form, None without one. Equal forms that are written in
    different ways have different hashes.
    """
    try:
        fields = {name: bytes(value) for name, value in msgspec.structs.asdict(_DECODER.decode(raw)).items()}
        if _FORMAT_DECODER.decode(fields["response_format"]) == _FREE_TEXT:
            fields["response_format"] = _NULL
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # The parser of requests refuses this body, with the reason.
        return None
    if fields["tool_choice"] in _FREE_CHOICES:
        fields["tool_choice"] = fields["tools"] = _NULL
    parts = fields.values()
    if all(part == _NULL for part in parts):
        return None
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(b"%d:" % len(part) + part)
    return hashed.digest()


@dataclass(slots=True)
class _Tenant:
    """A tenant's forms. known: those that engines served, least recently used first. refused_until, next_probe: times
    (monotonic) of the current refusal, 0 without one.
    """

    known: BoundedDict[bytes, None] = field(default_factory=lambda: BoundedDict(MAX_KNOWN))
    refused_until: float = 0.0
    next_probe: float = 0.0


class Forms:
    """The recently used forms and the current refusals, by tenant, in bounded memory."""

    def __init__(self) -> None:
        self._tenants = BoundedDict[str, _Tenant](MAX_TENANTS)

    async def read(self, tenant_id: str, raw: bytes, share: BodyShare) -> bytes | None:
        """Return the body's form. Raises EngineShareUsed for a new form of a tenant whose new forms are refused."""
        tenant = self._tenants.get(tenant_id)
        is_refused = tenant is not None and tenant.next_probe > 0
        if not is_refused and (len(raw) > INLINE_BYTES or not any(mark in raw for mark in _MARKS)):
            return None
        work = partial(form_of, raw)
        form = work() if len(raw) <= INLINE_BYTES else await share.run(work)
        if form is not None and tenant is not None:
            self._check(tenant, form)
        return form

    def _check(self, tenant: _Tenant, form: bytes) -> None:
        if form in tenant.known or not tenant.next_probe:
            return
        now = time.monotonic()
        if now < tenant.next_probe:
            raise EngineShareUsed(
                "Your share of the engine is used up: new structured output forms of this tenant are not compiled now.",
                retry_after=max(1, math.ceil(tenant.refused_until - now)),
            )
        tenant.next_probe = now + ANSWER_SECONDS

    def served(self, tenant_id: str, form: bytes | None) -> None:
        """Record that an engine serves a request of this form. A new one ends the refusal of new forms."""
        if form is None:
            return
        tenant = self._tenant(tenant_id)
        if form not in tenant.known:
            tenant.refused_until = tenant.next_probe = 0.0
        tenant.known.put(form, None)

    def refused(self, tenant_id: str, form: bytes | None, retry_after: int) -> None:
        """Record that the engines refuse to compile new forms of a tenant for `retry_after` seconds."""
        if form is None:
            return
        tenant, now = self._tenant(tenant_id), time.monotonic()
        tenant.known.pop(form, None)
        tenant.refused_until = now + retry_after
        tenant.next_probe = now + min(PROBE_SECONDS, retry_after)

    def _tenant(self, tenant_id: str) -> _Tenant:
        tenant = self._tenants.get(tenant_id) or _Tenant()
        self._tenants.put(tenant_id, tenant)
        return tenant
