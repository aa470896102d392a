"""Attempts of one tenant to find another's adapters, for every route of the gateway's table.

Each attempt is made with two targets: another tenant's adapter, and one that does not exist. The answers must be equal.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gateway.api.route import Route
from testing.gateway.running import HI, Answer, Client

# Headers that differ between any two answers.
VOLATILE = ("date", "x-request-id")
# Adapter of the tenant that makes the attempts.
OWN = "mine"
SIZE = 5_000_000


@dataclass(frozen=True, slots=True)
class Target:
    """Adapter to look for. digest: without `sha256:`. upload: id of an unfinished upload. key: id of an API key. All
    targets' names have the same length, and so have their tenants' names.
    """

    tenant: str
    name: str
    digest: str
    upload: str
    key: str = "0" * 16

    @property
    def models(self) -> tuple[str, ...]:
        """Return the texts by which a request may name it."""
        name = self.name
        own = (name, f"{name}@1", f"{name}@2", f"{name}:latest", f"{name}:prod", f"{name}:canary")
        mixtures = (f"{name}*0.7+{name}@1*0.3", f"{OWN}*0.5+{name}*0.5", f"{OWN}*0.5+{name}:prod*0.5")
        qualified = (f"{self.tenant}/{name}", f"sha256:{self.digest}", self.digest)
        return *own, *mixtures, *qualified

    def shown_as(self, other: "Target", content: bytes) -> bytes:
        """Return the content of an answer about this target with the other target's names and ids in place of its
        own.
        """
        for field_name in ("name", "digest", "upload", "tenant", "key"):
            content = content.replace(getattr(self, field_name).encode(), getattr(other, field_name).encode())
        return content


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request. It changes nothing, so that it can be repeated."""

    method: str
    path: str
    options: dict[str, Any] = field(default_factory=dict)

    async def send(self, client: Client) -> Answer:
        return await client.call(self.method, self.path, **{"allow_redirects": False} | self.options)


def fingerprint(answer: Answer) -> tuple[int, dict[str, str], bytes]:
    """Return the parts of an answer that must not depend on the target."""
    headers = {name.lower(): value for name, value in answer.headers.items() if name.lower() not in VOLATILE}
    # A redirect to the log-in page repeats the path.
    if "location" in headers:
        headers["location"] = headers["location"].partition("?")[0]
    return answer.status, headers, answer.body


def attempts(route: Route, target: Target) -> list[Attempt]:
    """Return the attempts at a route. Raises KeyError for a tenant's route without a case here."""
    if route.scope in ("admin", "page", None):
        # A tenant's key opens none of them, or they show everybody the same.
        return [Attempt(route.method, _fill(route, target), {} if route.request is None else {"json": {}})]
    make = CASES[route.method, route.path]
    return [Attempt(route.method, _fill(route, target) + rest, options) for rest, options in make(target)]


def _fill(route: Route, target: Target) -> str:
    values = {
        "tenant": target.tenant,
        "name": target.name,
        "model": f"{target.tenant}/{target.name}",
        "id": target.key if "/keys/" in route.path else target.upload,
        "version": "1",
        "alias": "prod",
        "plan": "gold",
        "act": "drain",
    }
    return re.sub(r"{(\w+)}", lambda found: values[found[1]], route.canonical)


Case = Callable[[Target], Iterator[tuple[str, dict[str, Any]]]]


def _plain(*bodies: dict[str, Any] | None, rests: tuple[str, ...] = ("",), key: str | None = None) -> Case:
    def make(_: Target) -> Iterator[tuple[str, dict[str, Any]]]:
        headers = {} if key is None else {"Idempotency-Key": key}
        for rest in rests:
            for body in bodies or (None,):
                yield rest, {"headers": headers} | ({} if body is None else {"json": body})

    return make


def _completions(prompt: dict[str, Any]) -> Case:
    def make(target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
        for model in target.models:
            body = {"model": model, "max_tokens": 2} | prompt
            yield "", {"json": body}
            yield "", {"json": body | {"stream": True}}
        # With a key that the other tenant used for the same request.
        body = {"model": target.name, "max_tokens": 2} | prompt
        yield "", {"json": body, "headers": {"Idempotency-Key": f"shared-{target.name}"}}

    return make


def _models(target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    # The path has the name already.
    yield "", {}
    for model in target.models:
        if model.startswith(target.name):
            yield model.removeprefix(target.name), {}


def _parts(target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    for offset in (0, 1 << 20):
        query = f"?offset={offset}&sha256={'0' * 64}"
        yield query, {"data": b"x" * 10}


def _refused_imports(target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    for source in (f"s3://{target.tenant}/{target.name}", f"file:///{target.digest}", target.digest):
        yield f"?name={target.name}&source={source}", {}


def _refused_pushes(target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "", {"json": {"name": target.name, "digest": target.digest}}
    boundary = "x" * 20
    form = f'--{boundary}\r\nContent-Disposition: form-data; name="name"\r\n\r\n{target.name}\r\n--{boundary}--\r\n'
    yield "", {"data": form.encode(), "headers": {"Content-Type": f"multipart/form-data; boundary={boundary}"}}


def _refused_uploads(target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    yield f"?name={target.name}&size=0&sha256={target.digest}", {}
    yield f"?name={target.name}&size={SIZE}&sha256=sha256:{target.digest}", {}


def _reports(target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "?group_by=model,day", {}
    for query in (f"after={target.name}", f"group_by={target.name}", f"tenant={target.tenant}"):
        yield f"?{query}", {}


def _requests(target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    # Without an end in the past, the list would contain the attempts themselves.
    for query in (f"model={target.name}&until=2020-01-01", f"tenant={target.tenant}", f"key={target.digest}&limit=0"):
        yield f"?{query}", {}


def _entries(target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    # Without an end in the past, the list would contain the attempts themselves.
    for query in ("until=2020-01-01", f"after={target.digest[:32]}", f"tenant={target.tenant}"):
        yield f"?{query}", {}


def _refused_mixtures(target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    for reference in (target.name, f"{target.name}@1", f"{target.name}:prod", f"{target.name}:none"):
        yield "", {"json": {"model": f"{reference}*0.5"}}
        yield "", {"json": {"model": f"{reference}*0.5+{reference}*0.25"}, "headers": {"If-Match": "*"}}


def _refused_keys(target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    for model in target.models:
        yield "", {"json": {"allowed_models": [model]}}


TARGETS = {"targets": [{"version": 1, "weight": 95}, {"version": 2, "weight": 5}]}
FORCED = ("", "?force=true")
_NAME = "/v1/adapters/{name}"
_VERSION, _ALIAS = f"{_NAME}/versions/{{version}}", f"{_NAME}/aliases/{{alias}}"
_UPLOAD = "/v1/adapter-uploads/{id}"
# Attempts at each of a tenant's routes: what follows the filled path, and the request's options.
CASES: dict[tuple[str, str], Case] = {
    ("POST", "/v1/keys"): _refused_keys,
    ("GET", "/v1/keys"): _plain(),
    ("POST", "/v1/keys/{id}/rotate"): _plain({"grace_seconds": 0}),
    ("PATCH", "/v1/keys/{id}"): _plain({}, {"label": "x"}),
    ("DELETE", "/v1/keys/{id}"): _plain(),
    ("GET", "/v1/audit"): _entries,
    ("POST", "/v1/chat/completions"): _completions({"messages": HI}),
    ("POST", "/v1/completions"): _completions({"prompt": "Hi"}),
    ("GET", "/v1/models"): _plain(),
    ("GET", "/v1/models/{name:.+}"): _models,
    ("POST", "/v1/adapters"): _refused_pushes,
    ("GET", "/v1/adapters"): _plain(),
    ("GET", "/v1/adapter-uploads"): _plain(),
    ("GET", _NAME): _plain(),
    ("GET", f"{_NAME}/use"): _plain(),
    ("DELETE", _NAME): _plain(rests=FORCED),
    ("GET", f"{_NAME}/versions"): _plain(),
    ("GET", _VERSION): _plain(),
    ("PATCH", _VERSION): _plain(
        {"state": "retired"}, {"state": "ready"}, {"expires_at": None}, {"pinned": True}, rests=FORCED
    ),
    ("DELETE", _VERSION): _plain(rests=FORCED),
    ("GET", f"{_NAME}/aliases"): _plain(),
    ("GET", _ALIAS): _plain(),
    ("PUT", _ALIAS): _plain(TARGETS, {"targets": [{"version": 9}]}),
    ("POST", f"{_ALIAS}/rollback"): _plain(),
    ("DELETE", _ALIAS): _plain(),
    ("GET", "/v1/mixtures"): _plain(),
    ("GET", "/v1/mixtures/{name}"): _plain(),
    ("PUT", "/v1/mixtures/{name}"): _refused_mixtures,
    ("DELETE", "/v1/mixtures/{name}"): _plain(),
    ("POST", "/v1/adapter-uploads"): _refused_uploads,
    ("GET", _UPLOAD): _plain(),
    ("PUT", _UPLOAD): _parts,
    ("POST", f"{_UPLOAD}/complete"): _plain(key="shared"),
    ("DELETE", _UPLOAD): _plain(),
    ("POST", "/v1/adapter-imports"): _refused_imports,
    ("GET", f"{_VERSION}/probe"): _plain(),
    ("POST", f"{_VERSION}/probe"): _plain(),
    ("GET", f"{_VERSION}/golden"): _plain(),
    ("PUT", f"{_VERSION}/golden"): _plain({"prompts": [{"prompt": "Hi"}]}, {"prompts": []}),
    ("DELETE", f"{_VERSION}/golden"): _plain(),
    ("POST", f"{_VERSION}/golden/check"): _plain(),
    ("GET", "/v1/key"): _plain(),
    ("GET", "/v1/usage"): _reports,
    ("GET", "/v1/requests"): _requests,
    ("GET", "/v1/requests/{id}"): _plain(),
}
# Conditions under which aliases move; with another tenant's alias they must not change the answer.
CONDITIONS = ({"If-Match": "*"}, {"If-Match": '"1"'}, {"If-None-Match": "*"})


def conditional(attempt: Attempt) -> list[Attempt]:
    """Return an attempt to move an alias under each of the CONDITIONS."""
    return [Attempt(attempt.method, attempt.path, attempt.options | {"headers": given}) for given in CONDITIONS]


def describe(attempt: Attempt) -> str:
    """Return a short text of an attempt, for tables and failures."""
    body = attempt.options.get("json") or {}
    shown = {key: value for key, value in body.items() if key not in ("messages", "prompt", "max_tokens")}
    return " ".join(filter(None, [attempt.method, attempt.path, json.dumps(shown) if shown else ""]))
