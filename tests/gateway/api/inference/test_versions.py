"""Versions and aliases in requests: the engine's adapter, the answer's name, the ledger's row, and permissions."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

from testing.gateway.running import Gateway, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push


async def test_references_from_the_request_to_the_ledger(gateway: Gateway, upstream: Upstream, tmp_path: Path):
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    digests = [(await push(acme, "pirate", files(seed))).json["digest"] for seed in (1, 2)]
    for text, digest in (("pirate", digests[1]), ("pirate@1", digests[0]), ("pirate:latest", digests[1])):
        for stream in (False, True):
            answer = await acme.chat(model=text, stream=stream)
            assert answer.status == 200, answer.body
            assert answer.headers["x-loraplex-adapter-digest"] == digest
            assert upstream.requests[-1][1]["model"] == digest
            shown = answer.events[0]["model"] if stream else answer.json["model"]
            assert shown == ("pirate" if text == "pirate:latest" else text)
        described = await acme.get(f"/v1/models/{text}")
        assert (described.status, described.json["id"], described.json["parent"]) == (200, text, "base")
    # A mixture has one name in the usage rows, however its terms and weights are written.
    for text in (
        "pirate@1*0.5+pirate@2*0.25",
        "pirate@2*.250+pirate@1*00.50",
        "pirate@1*0.2+pirate@2*25e-2+pirate@1*0.3",
    ):
        mixed = await acme.chat(model=text)
        assert mixed.json["model"] == text

    async def recorded() -> bool:
        rows = {row["model"]: row["requests"] for row in await acme.usage()}
        return rows == {"pirate": 6, "pirate*0.25+pirate*0.5": 3}

    await until(recorded)
    with closing(sqlite3.connect(tmp_path / "gateway.db")) as database:
        rows = database.execute("SELECT version, count(*) FROM usage GROUP BY 1 ORDER BY 1").fetchall()
    assert rows == [(None, 3), (1, 2), (2, 4)]
    # Another tenant's version and an absent one get the same answer.
    for text in ("pirate@1", "pirate@9", "pirate:latest", "pirate:prod", "none@1"):
        refused = await globex.chat(model=text)
        assert (refused.status, refused.error["code"]) == (404, "model_not_found")
        assert refused.error["message"] == f"The model '{text}' does not exist or you do not have access to it."
        assert (await globex.get(f"/v1/models/{text}")).error == refused.error
    for text in ("pirate@9", "pirate:prod", "PIRATE@1", "pirate@1@1"):
        assert (await acme.chat(model=text)).status == 404, text
        assert (await acme.get(f"/v1/models/{text}")).status == 404, text
    for text, status in (("pirate*1", 404), ("pirate*x", 400), ("pirate*1+pirate*1", 404)):
        assert (await acme.get(f"/v1/models/{text}")).status == status, text


async def test_keys_limits_and_prices_take_plain_names(gateway: Gateway):
    acme = await gateway.tenant("acme")
    for name in ("pirate", "json"):
        assert (await push(acme, name, files())).status == 201
    for path, body in (
        ("/admin/api/tenants/acme/keys", {"allowed_models": ["pirate@1"]}),
        ("/admin/api/tenants", {"name": "new", "model_limits": {"pirate:prod": {}}}),
    ):
        assert (await gateway.admin.post(path, body)).error["code"] == "unknown_model"
    made = await gateway.admin.post("/admin/api/tenants/acme/keys", {"allowed_models": ["pirate"]})
    scoped = gateway.client(made.json["key"])
    for text, status in (("pirate@1", 200), ("pirate:latest", 200), ("json@1", 403), ("pirate@1*1+json@1*1", 403)):
        assert (await scoped.chat(model=text)).status == status, text
        assert (await scoped.get(f"/v1/models/{text}")).status == (404 if status == 200 and "*" in text else status)
    limits = {"model_limits": {"pirate": {"requests_per_minute": 2}}}
    assert (await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json=limits)).status == 200
    # `json` has the same content, so it counts too.
    statuses = [(await acme.chat(model=text)).status for text in ("pirate@1", "json:latest", "pirate", "pirate@1")]
    assert statuses == [200, 200, 429, 429]


PROD = "/v1/adapters/pirate/aliases/prod"


async def test_aliases_by_http(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme")
    digests = [(await push(acme, "pirate", files(seed))).json["digest"] for seed in (1, 2)]
    made = await acme.call("PUT", PROD, json={"targets": [{"version": 1}]})
    assert made.status == 201, made.body
    assert made.json["targets"] == [{"version": 1, "weight": 1, "expires_at": None}]
    assert (await acme.chat(model="pirate:prod")).headers["x-loraplex-adapter-digest"] == digests[0]
    body = {"targets": [{"version": 1, "weight": 95}, {"version": 2, "weight": 5}]}
    missing = await acme.call("PUT", PROD, json=body)
    assert (missing.status, missing.error["code"]) == (428, "precondition_required")
    moved = await acme.call("PUT", PROD, json=body, headers={"If-Match": missing.headers["ETag"]})
    assert (moved.status, moved.headers["ETag"]) == (200, moved.json["etag"])
    lost = await acme.call("PUT", PROD, json=body, headers={"If-Match": made.headers["ETag"]})
    assert (lost.status, lost.error["code"], lost.headers["ETag"]) == (412, "precondition_failed", moved.json["etag"])
    # A user and a session each stay with one version.
    for options in ({"user": "u"}, {"headers": {"x-loraplex-session": "s"}}):
        headers = options.pop("headers", {})
        body = {"model": "pirate:prod", "messages": [{"role": "user", "content": "Hi"}], **options}
        answers = [await acme.post("/v1/chat/completions", body, headers=headers) for _ in range(5)]
        assert len({answer.headers["x-loraplex-adapter-digest"] for answer in answers}) == 1
    back = await acme.call("POST", f"{PROD}/rollback")
    assert (back.json["targets"], back.json["history"]) == (made.json["targets"], [])
    again = await acme.call("POST", f"{PROD}/rollback")
    assert (again.status, again.error["code"]) == (409, "no_earlier_state")
    listed = await acme.get("/v1/adapters/pirate/aliases")
    assert [each["alias"] for each in listed.json["data"]] == ["latest", "prod"]
    for wrong, param in (
        ({}, "targets"),
        ({"targets": [{"version": 1}], "more": 1}, "more"),
        ({"targets": []}, "targets"),
        ({"targets": [{"version": 0}]}, "targets[0].version"),
        ({"targets": [{"version": 1, "weight": 10_001}]}, "targets[0].weight"),
        ({"targets": [{"version": 1, "expires_at": "2001-01-01T00:00:00Z"}]}, "targets"),
        ({"targets": [{"version": 7}]}, "targets"),
    ):
        refused = await acme.call("PUT", PROD, json=wrong, headers={"If-Match": "*"})
        assert (refused.status, refused.error["param"]) == (400, param), refused.body
    large = await acme.call("PUT", PROD, data=b'{"targets": [' + b" " * 20_000 + b"]}", headers={"If-Match": "*"})
    assert large.status == 413
    assert (await acme.call("PATCH", "/v1/adapters/pirate/versions/1", json={})).error["param"] == "state"
    assert (await acme.call("DELETE", PROD)).json["deleted"]
    assert (await acme.chat(model="pirate:prod")).status == 404
    audit = (await gateway.admin.get("/admin/api/audit?tenant=acme&action=adapter")).json["data"]
    assert [each["action"].partition(".")[2] for each in reversed(audit)] == [
        *("push", "push", "alias", "alias", "rollback", "alias_delete")
    ]


async def test_a_version_in_use_is_deleted_by_force_and_running_requests_finish(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme")
    for seed in (1, 2):
        assert (await push(acme, "pirate", files(seed))).status == 201
    upstream.paused = True
    tasks = [
        asyncio.create_task(acme.chat(model=model, stream=True, x_engine={"pause": True, "tokens": 3}))
        for model in ("pirate@1", "pirate@2*0.5")
    ]

    async def running() -> bool:
        return len(upstream.requests) == 2

    await until(running)
    one = "/v1/adapters/pirate/versions/1"
    for path in (one, "/v1/adapters/pirate"):
        refused = await acme.call("DELETE", path)
        assert (refused.status, refused.error["code"]) == (409, "adapter_in_use"), path
        assert "running requests" in refused.error["message"]
    assert (await acme.call("DELETE", f"{one}?force=true")).json == {
        "object": "adapter.version",
        "name": "pirate",
        "version": 1,
        "deleted": True,
    }
    assert (await acme.chat(model="pirate@1")).status == 404
    path = "/admin/api/tenants/acme/adapters/pirate"
    refused = await gateway.admin.call("DELETE", path)
    assert "pirate@2 is in use by running requests" in refused.error["message"]
    upstream.paused = False
    for answer in await asyncio.gather(*tasks):
        assert answer.events[-1] == "[DONE]", "a running request ends as if nothing had happened"

    async def deleted() -> bool:
        return (await gateway.admin.call("DELETE", path)).status == 200

    await until(deleted)
    assert (await acme.chat(model="pirate")).status == 404


async def test_states_by_http(gateway: Gateway):
    acme = await gateway.tenant("acme")
    path = "/v1/adapters/pirate/versions"
    query = {"name": "pirate", "size": "5000000", "sha256": "0" * 64}
    begun = await acme.call("POST", "/v1/adapter-uploads", params=query)
    assert begun.status == 201, begun.body
    (uploading,) = (await acme.get(path)).json["data"]
    assert (uploading["state"], uploading["upload"], uploading["version"]) == ("uploading", begun.json["id"], None)
    await acme.call("DELETE", f"/v1/adapter-uploads/{begun.json['id']}")
    assert (await acme.get(path)).status == 404
    broken = files() | {"adapter_config.json": b"{}"}
    refused = await push(acme, "pirate", broken)
    assert refused.status == 400
    (rejected,) = (await acme.get(path)).json["data"]
    assert (rejected["version"], rejected["state"], rejected["digest"]) == (1, "rejected", None)
    assert rejected["reasons"] == [{key: refused.error[key] for key in ("message", "param", "code")}]
    assert (await acme.get("/v1/adapters")).json["data"] == []
    assert (await push(acme, "pirate", files())).json["version"] == 2
    retired = await acme.call("PATCH", f"{path}/2", json={"state": "retired"})
    assert (retired.status, retired.error["code"]) == (409, "adapter_in_use")
    retired = await acme.call("PATCH", f"{path}/2?force=true", json={"state": "retired"})
    assert retired.json["state"] == "retired"
    assert (await acme.chat(model="pirate")).status == 404
    assert [model["id"] for model in (await acme.get("/v1/models")).json["data"]] == ["base"]
    assert (await acme.get("/v1/adapters/pirate")).json["state"] == "retired"
    ready = await acme.call("PATCH", f"{path}/2", json={"state": "ready", "expires_at": "2050-01-01T00:00:00Z"})
    assert (ready.json["state"], ready.json["expires_at"]) == ("ready", "2050-01-01T00:00:00Z")
    assert (await acme.chat(model="pirate")).status == 200
    # In UTC these are beyond the calendar's end.
    last = "9999-12-31T23:59:59-14:00"
    beyond = await acme.call("PATCH", f"{path}/2", json={"expires_at": last})
    assert (beyond.status, beyond.error["param"]) == (400, "expires_at")
    targets = {"targets": [{"version": 2, "expires_at": last}]}
    beyond = await acme.call("PUT", "/v1/adapters/pirate/aliases/prod", json=targets)
    assert (beyond.status, beyond.error["param"]) == (400, "targets[0].expires_at")
    pinned = await acme.call("PATCH", f"{path}/2", json={"pinned": True})
    assert (pinned.status, pinned.error["param"]) == (403, "pinned")
    pinned = await gateway.admin.call(
        "PATCH", "/admin/api/tenants/acme/adapters/pirate/versions/2", json={"pinned": True}
    )
    assert pinned.json["pinned"] is True
    assert (await acme.call("DELETE", f"{path}/1")).status == 200
    assert [each["version"] for each in (await acme.get(path)).json["data"]] == [2]


async def test_anothers_versions_and_aliases_and_absent_ones_answer_alike(gateway: Gateway):
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    assert (await push(acme, "pirate", files())).status == 201
    assert (await acme.call("PUT", PROD, json={"targets": [{"version": 1}]})).status == 201
    targets = {"targets": [{"version": 1}]}
    for method, rest, body in (
        ("GET", "/versions", None),
        ("GET", "/versions/1", None),
        ("PATCH", "/versions/1", {"state": "retired"}),
        ("PATCH", "/versions/1?force=true", {"expires_at": "2050-01-01T00:00:00Z"}),
        ("DELETE", "/versions/1?force=true", None),
        ("DELETE", "?force=true", None),
        ("GET", "/aliases", None),
        ("GET", "/aliases/prod", None),
        ("PUT", "/aliases/prod", targets),
        ("POST", "/aliases/prod/rollback", None),
        ("DELETE", "/aliases/prod", None),
    ):
        answers = [await globex.call(method, f"/v1/adapters/{name}{rest}", json=body) for name in ("pirate", "absent")]
        assert [answer.status for answer in answers] == [404, 404], (method, rest)
        assert answers[0].body.replace(b"pirate", b"absent") == answers[1].body
        assert set(answers[0].headers) == set(answers[1].headers)
    made = await gateway.admin.post("/admin/api/tenants/acme/keys?force=true", {"allowed_models": ["other"]})
    assert (await gateway.client(made.json["key"]).get("/v1/adapters/pirate/versions")).status == 403
    assert (await acme.chat(model="pirate:prod")).status == 200
