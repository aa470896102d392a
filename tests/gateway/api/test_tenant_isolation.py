"""Another tenant's adapters and absent ones are the same to a tenant: every route, with its status, headers, body and
SQL queries.
"""

import hashlib
import io
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import Engine, event

from gateway.api.route import Route
from gateway.route_table import ROUTES
from testing.gateway.isolation import CASES, OWN, Attempt, Target, attempts, conditional, describe, fingerprint
from testing.gateway.running import Client, Gateway, running_alone, settings
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push, tarred

pytestmark = pytest.mark.asyncio(loop_scope="module")
ARCHIVE = tarred(files(1) | {"rest": bytes(1 << 20)})
ABSENT = Target("nobod", "absent", "0" * 64, "0" * 32)
LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "adapter_changes_per_minute")
# Fields that differ between two adapters of one tenant.
OWN_FIELDS = re.compile(
    rb'"(?:digest|sha256|id|etag|created_at|expires_at|probed_at|created)":(?:"(?:\\.|[^"\\])*"|[^,}\]]*)'
)


def plain(headers: dict[str, str]) -> dict[str, str]:
    """Return headers without those that depend on the content."""
    return {name: value for name, value in headers.items() if name not in ("etag", "x-loraplex-adapter-digest")}


class Queries:
    """SQL statements of this process that name a tenant. seen: with their parameters, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @contextmanager
    def recorded(self, tenant_id: str) -> Iterator[None]:
        def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
            if tenant_id in repr(parameters):
                self.seen.append(statement)

        event.listen(Engine, "before_cursor_execute", note)
        try:
            yield
        finally:
            event.remove(Engine, "before_cursor_execute", note)


class Neighbours:
    """A gateway with two tenants. acme has `theirs` in every state; globex has only OWN and looks for `theirs`.

    before: globex' answers from the routes without a name in their path, before acme had anything.
    """

    def __init__(self, gateway: Gateway, upstream: Upstream, folder: Path) -> None:
        self.gateway, self.upstream, self.folder = gateway, upstream, folder
        self.before: dict[str, Any] = {}

    async def prepare(self) -> None:
        # Without limits no header counts its requests.
        self.globex = await self.gateway.tenant("globex", **dict.fromkeys(LIMITS))
        assert (await push(self.globex, OWN, files(9))).status == 201
        self.before = await self.shown()
        self.acme = acme = await self.gateway.tenant("acmee")
        digests = [(await push(acme, "theirs", files(seed))).json["digest"] for seed in (1, 2, 3)]
        versions = "/v1/adapters/theirs/versions"
        for alias, targets in (("prod", [1]), ("canary", [1, 2])):
            body = {"targets": [{"version": number, "weight": 1} for number in targets]}
            assert (await acme.call("PUT", f"/v1/adapters/theirs/aliases/{alias}", json=body)).status == 201
        mixture = {"model": "theirs@1*0.5+theirs:prod*0.5"}
        assert (await acme.call("PUT", "/v1/mixtures/their-blend", json=mixture)).status == 201
        assert (await push(acme, "theirs", files(4) | {"adapter_config.json": b"{}"})).status == 400
        assert (await acme.call("PATCH", f"{versions}/1", json={"expires_at": "2050-01-01T00:00:00Z"})).status == 200
        path = "/admin/api/tenants/acmee/adapters/theirs/versions/2"
        assert (await self.gateway.admin.call("PATCH", path, json={"pinned": True})).status == 200
        query = {"name": "theirs", "size": len(ARCHIVE), "sha256": hashlib.sha256(ARCHIVE).hexdigest()}
        begun = await acme.post("/v1/adapter-uploads", params=query)
        assert begun.status == 201, begun.body
        for headers in ({}, {"Idempotency-Key": "shared"}):
            assert (
                (await acme.chat(model="theirs", max_tokens=2, headers=headers)).status == 200 if not headers else True
            )
        await self.use()
        key = acme.key.split("_")[1]
        self.theirs = Target("acmee", "theirs", digests[0].removeprefix("sha256:"), begun.json["id"], key)
        self.secrets = [*(each.removeprefix("sha256:") for each in digests), begun.json["id"], "acmee", "theirs"]

    async def use(self) -> None:
        """Let acme use its adapter, also with the idempotency key of the attempts."""
        for model in ("theirs", "theirs@1", "theirs:prod"):
            body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
            options = {"json": body, "headers": {"Idempotency-Key": f"shared-{model}"}}
            assert (await self.acme.call("POST", "/v1/chat/completions", **options)).status == 200
        self.upstream.resident = [(await self.acme.get("/v1/adapters/theirs")).json["digest"]]

    async def observe(
        self, client: Client, attempt: Attempt, queries: Queries
    ) -> tuple[tuple[int, dict[str, str], bytes], list[str]]:
        """Return an attempt's answer and its queries."""
        queries.seen.clear()
        answer = fingerprint(await attempt.send(client))
        return answer, list(queries.seen)

    def stored(self) -> dict[Path, tuple[int, int]]:
        """Return the files in the adapter store, with the values that change when a file is replaced."""
        files = (self.folder / "adapters").glob("??/*/*")
        return {path: (path.stat().st_ino, path.stat().st_ctime_ns) for path in files}

    async def shown(self) -> dict[str, Any]:
        """Return globex' answer from each route without a name in its path.

        The request log is left out: it has globex' attempts themselves.
        """
        paths = [
            route.path
            for route in ROUTES
            if route.method == "GET"
            and "{" not in route.path
            and "/login" not in route.path
            and route.path != "/v1/requests"
        ]
        return {path: fingerprint(await self.globex.get(path, allow_redirects=False)) for path in paths}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def neighbours(
    tmp_path_factory: pytest.TempPathFactory,
    model_dir: Path,
    shared_upstream: Upstream,
    redis_url: str,
    migrated: Path,
) -> AsyncIterator[Neighbours]:
    folder = tmp_path_factory.mktemp("isolation")
    shutil.copy(migrated, folder / "gateway.db")
    (folder / "imports").mkdir()
    shared_upstream.probe_status, shared_upstream.base_digest = 200, "b" * 64
    of = settings(
        folder,
        model_dir,
        [shared_upstream.url],
        redis_url,
        migrate_on_start=False,
        adapter_probe="required",
        import_sources=(f"file://{folder}/imports/",),
    )
    async with running_alone(of) as gateway:
        neighbours = Neighbours(gateway, shared_upstream, folder)
        await neighbours.prepare()
        yield neighbours


async def test_every_route_of_a_tenant_has_attempts():
    routes = {(route.method, route.path) for route in ROUTES if route.scope not in (None, "admin", "page")}
    assert routes == set(CASES)


async def test_every_route_answers_alike_for_a_foreign_and_an_absent_adapter(neighbours: Neighbours):
    theirs, admin = neighbours.theirs, neighbours.gateway.admin
    queries = Queries()
    clients = [neighbours.globex]
    for names in (None, [OWN], ["theirs", "absent", OWN]):
        # A key of some models could make keys for these, whether they exist or not: the operator named them.
        body = {"allowed_models": names, "scopes": ["adapters", "inference", "usage"] + ["keys"] * (names is None)}
        made = await admin.post("/admin/api/tenants/globex/keys?force=true", body)
        clients.append(neighbours.gateway.client(made.json["key"]))
    requests, probes = len(neighbours.upstream.requests), neighbours.upstream.probed
    with queries.recorded((await admin.get("/admin/api/tenants/globex")).json["id"]):
        for client in clients:
            for route in ROUTES:
                for foreign, absent in pairs(route, theirs):
                    # The query of globex' own adapter is in one of the two after its cached answer has expired, which
                    # happens more often on a busy machine.
                    for _ in range(20):
                        (status, headers, body), asked = await neighbours.observe(client, foreign, queries)
                        (*expected, text), asked_too = await neighbours.observe(client, absent, queries)
                        # A refusal lists the names of a key.
                        assert [status, headers] == expected, describe(foreign)
                        assert theirs.shown_as(ABSENT, body) == theirs.shown_as(ABSENT, text), describe(foreign)
                        if asked == asked_too:
                            break
                    assert asked == asked_too, describe(foreign)
                    if route.scope not in (None, "admin", "page"):
                        assert status in (200, 400, 403, 404, 415), (describe(foreign), body)
    assert len(neighbours.upstream.requests) == requests, "no attempt reached an engine"
    assert neighbours.upstream.probed == probes
    # Nothing of acme's has changed.
    acme = neighbours.acme
    assert [each["state"] for each in (await acme.get("/v1/adapters/theirs/versions")).json["data"]].count("ready") == 3
    assert (await acme.get(f"/v1/adapter-uploads/{theirs.upload}")).json["received"] == 0
    assert (await acme.chat(model="theirs:prod", max_tokens=2)).status == 200


def pairs(route: Route, theirs: Target) -> Iterator[tuple[Attempt, Attempt]]:
    if route.path.endswith("/login"):
        # The form has a new random value each time.
        return
    for foreign, absent in zip(attempts(route, theirs), attempts(route, ABSENT), strict=True):
        yield foreign, absent
        if route.path.endswith("/aliases/{alias}") and route.scope == "adapters":
            yield from zip(conditional(foreign), conditional(absent), strict=True)


async def test_listings_usage_and_metrics_show_nothing_of_anothers_work(neighbours: Neighbours):
    shown = await neighbours.shown()
    assert {"/v1/models", "/v1/adapters", "/v1/mixtures", "/v1/usage", "/metrics", "/openapi.json"} <= set(shown)
    for path, answer in shown.items():
        assert answer == neighbours.before[path], path
        assert not [secret for secret in neighbours.secrets if secret.encode() in answer[2]], path
    assert shown["/metrics"][0] == 403


async def test_an_upload_of_anothers_content_and_name_is_like_any_other(neighbours: Neighbours):
    """acme has the names and the content; nobody has the other name or content."""
    globex, upstream = neighbours.globex, neighbours.upstream
    found = []
    for name, seed in (("theirs", 1), ("absent", 101)):
        probes, before = upstream.probed, neighbours.stored()
        answers = [await push(globex, name, files(seed))]
        assert answers[0].status == 201, answers[0].body
        # Files that were there are replaced: the work is the same.
        new = [path for path, values in neighbours.stored().items() if before.get(path) != values]
        assert sorted(path.name for path in new) == ["adapter_config.json", "adapter_model.safetensors"]
        folder = neighbours.folder / "imports" / str(seed)
        folder.mkdir()
        for file, content in files(seed).items():
            (folder / file).write_bytes(content)
        source = {"name": name, "source": f"file://{folder}"}
        answers.append(await globex.post("/v1/adapter-imports", params=source))
        archive = ARCHIVE if seed == 1 else tarred(files(seed) | {"rest": bytes(1 << 20)})
        checksum = hashlib.sha256(archive).hexdigest()
        query = {"name": name, "size": len(archive), "sha256": checksum}
        begun = await globex.post("/v1/adapter-uploads", params=query)
        answers += [begun, await globex.post("/v1/adapter-uploads", params=query)]
        upload = f"/v1/adapter-uploads/{begun.json['id']}"
        part = {"offset": 0, "sha256": checksum}
        answers.append(await globex.call("PUT", upload, params=part, data=io.BytesIO(archive)))
        answers.append(await globex.post(f"{upload}/complete"))
        for path in ("", "/versions", "/versions/1", "/versions/1/probe", "/aliases", "/aliases/prod"):
            answers.append(await globex.get(f"/v1/adapters/{name}{path}"))
        answers += [await globex.chat(model=text, max_tokens=2) for text in (name, f"{name}@1", f"{name}:prod")]
        answers.append(await globex.call("DELETE", f"/v1/adapters/{name}?force=true"))
        assert begun.json["id"] != neighbours.theirs.upload
        shown = [fingerprint(answer) for answer in answers]
        found.append([(status, plain(headers), OWN_FIELDS.sub(b"", body)) for status, headers, body in shown])
        found[-1].append((upstream.probed - probes, {}, b""))
    foreign, fresh = found
    for one, other in zip(foreign, fresh, strict=True):
        assert (one[0], one[1], one[2].replace(b"theirs", b"absent")) == other
    assert [status for status, _, _ in foreign[:6]] == [201, 201, 201, 201, 200, 201]
    # acme's version 1 is still served.
    assert (await neighbours.acme.chat(model="theirs@1", max_tokens=2)).status == 200
