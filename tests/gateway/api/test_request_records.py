"""Records of requests in a running gateway: the details of usage rows, refused requests, and ids that fit together."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.quota import growing_hold
from testing.gateway.running import HI_TOKENS, Gateway, until
from testing.gateway.upstream import Upstream


def records(folder: Path, query: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(folder / "gateway.db")) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(query)]


async def found(folder: Path, query: str, number: int = 1) -> list[dict[str, Any]]:
    """Return the rows of a query, once there are so many."""

    async def are_there() -> bool:
        return len(records(folder, query)) >= number

    await until(are_there)
    return records(folder, query)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_usage_row_has_the_details_of_its_request(gateway: Gateway, tmp_path: Path, stream: bool):
    acme = await gateway.tenant("acme")
    answer = await acme.chat(user="ann\n" + "x" * 200, max_tokens=9, stream=stream)
    request_id = answer.headers["x-request-id"]
    ids = {event["id"] for event in answer.events if event != "[DONE]"} if stream else {answer.json["id"]}
    assert ids == {"chatcmpl-" + request_id.removeprefix("req_")}
    [row] = await found(tmp_path, "SELECT * FROM usage")
    assert row["request_id"] == request_id
    assert row["end_user"] == "ann\ufffd" + "x" * 124
    assert row["reserved_tokens"] == HI_TOKENS + 9
    assert 0 <= row["admission_ms"] <= row["latency_ms"]
    assert 0 <= row["queue_ms"] <= row["latency_ms"]
    assert row["error_code"] is None


async def test_a_completions_id_ends_like_the_requests(gateway: Gateway):
    answer = await (await gateway.tenant("acme")).complete()
    assert answer.json["id"] == "cmpl-" + answer.headers["x-request-id"].removeprefix("req_")


async def test_a_failed_requests_row_has_the_code_that_its_client_got(gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme")
    answer = await acme.chat(stream=True, x_engine={"fail_after": 1})
    [row] = await found(tmp_path, "SELECT * FROM usage")
    assert row["error_code"] == answer.events[-1]["error"]["code"]
    [count] = await found(tmp_path, "SELECT * FROM refusal_counts WHERE level = 60 AND tenant_id != '*'")
    assert (count["code"], count["status"], count["tenant"], count["requests"]) == (row["error_code"], 0, "acme", 1)


@pytest.mark.parametrize("keeps_allowances", [True, False], ids=["kept", "counted here"])
async def test_the_row_of_an_answer_that_a_limit_ended_names_the_limit(
    gateway: Gateway, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_allowances: bool
):
    upstream.keeps_allowances = keeps_allowances
    monkeypatch.setattr(growing_hold, "FIRST", 20.0)
    acme = await gateway.tenant("acme", tokens_per_minute=300, tokens_per_day=10**6)
    assert (await acme.chat(max_tokens=80, x_engine={"tokens": 80})).status == 200
    cut = await acme.chat(stream=True, max_tokens=240, x_engine={"tokens": 240, "delay": 0.002})
    assert "error" in cut.events[-1]
    rows = await found(tmp_path, "SELECT * FROM usage ORDER BY created_at", 2)
    assert [row["limit_name"] for row in rows] == [None, "tokens_per_minute"]
    [cause] = (await gateway.admin.get("/admin/api/refusals")).json["causes"]
    assert (cause["outcome"], cause["limit_name"], cause["requests"]) == ("cut", "tokens_per_minute", 1)
    for name, number in (("tokens_per_minute", 1), ("tokens_per_day", 0)):
        log = (await gateway.admin.get(f"/admin/api/requests?status=failed&limit_name={name}")).json["data"]
        assert [each["ended_by"] for each in log] == [name] * number


async def test_refused_requests_have_rows(gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme", requests_per_minute=1)
    assert (await acme.chat(model="none\u0007", user="ann")).status == 404
    assert (await acme.chat(temperature="hot")).status == 400
    assert (await acme.chat()).status == 200
    limited = await acme.chat(user="ann")
    assert (await acme.get("/v1/adapters/none")).status == 404
    assert (await gateway.nobody.chat()).status == 401
    assert (await gateway.admin.get("/admin/api/tenants/none")).status == 404
    rows = await found(tmp_path, "SELECT * FROM refused_requests ORDER BY at", 4)
    assert [(row["route"], row["status"], row["code"]) for row in rows] == [
        ("/v1/chat/completions", 404, "model_not_found"),
        ("/v1/chat/completions", 400, "invalid_request_error"),
        ("/v1/chat/completions", 429, "rate_limit_exceeded"),
        ("/v1/adapters/{name}", 404, "not_found"),
    ]
    assert (rows[0]["model"], rows[0]["end_user"]) == ("none\ufffd", "ann")
    assert (rows[1]["model"], rows[1]["param"]) == (None, "temperature")
    assert rows[2]["request_id"] == limited.headers["x-request-id"]
    assert (rows[2]["limit_name"], rows[2]["limit_owner"], rows[2]["limit_value"]) == (
        "requests_per_minute",
        "tenant",
        1,
    )
    assert (rows[2]["needed"], rows[2]["remaining"]) == (1, 0)
    assert {(row["tenant"], row["key_id"]) for row in rows} == {("acme", acme.key.split("_")[1])}
    [nobodys] = await found(tmp_path, "SELECT * FROM refusal_counts WHERE level = 60 AND tenant_id = ''")
    assert (nobodys["code"], nobodys["requests"]) == ("invalid_api_key", 1)


async def test_a_request_without_an_engine_has_one_row(gateway: Gateway, tmp_path: Path, upstream: Upstream):
    acme = await gateway.tenant("acme")
    upstream.healthy = False

    async def is_away() -> bool:
        return (await acme.chat()).status == 503

    await until(is_away)
    rows = await found(tmp_path, "SELECT * FROM refused_requests")
    assert {row["code"] for row in rows} == {"no_engine"}
    assert not {row["request_id"] for row in records(tmp_path, "SELECT * FROM usage")} & {r["request_id"] for r in rows}
