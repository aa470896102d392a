"""The engine's receipt: the adapter whose pages its steps read."""

from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.calls.receipts import OTHER as NO_RECEIPT
from gateway.fleet.calls.receipts import served_digest
from gateway.records.sql.database import Database
from gateway.records.usage.report import UsageReport
from testing.gateway.running import Gateway, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push

HEADER = "x-loraplex-adapter-digest"
OTHER = "sha256:" + "0" * 64


async def row_of(gateway: Gateway, tmp_path: Path, request_id: str) -> Any:
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    found: list[Any] = []

    async def is_written() -> bool:
        found[:] = [row for row in await UsageReport(database).recent() if row.request_id == request_id]
        return bool(found)

    try:
        await until(is_written)
    finally:
        await database.close()
    return found[0]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("receipt", "served"), [(True, "base"), (None, None)])
async def test_the_receipt_is_handed_on_and_kept(
    stream: bool, receipt: Any, served: str | None, gateway: Gateway, upstream: Upstream, tmp_path: Path
):
    upstream.receipt = receipt
    acme = await gateway.tenant("acme")
    got = await acme.complete(stream=stream)
    assert (got.status, got.headers.get(HEADER)) == (200, served)
    assert (await row_of(gateway, tmp_path, got.headers["x-request-id"])).served_digest == served


@pytest.mark.parametrize("receipt", ["", "sha256:", "\0", "sha256:" + "\0" * 64, "0" * 65, "G" * 64, "x" * 10_000])
def test_a_text_that_is_no_receipt_is_kept_as_other(receipt: str):
    """PostgreSQL refuses a NUL, so the usage rows of the same batch were written again and again."""
    assert served_digest(receipt) == NO_RECEIPT


@pytest.mark.parametrize("how", ["whole", "stream", "mixed"])
async def test_another_adapters_answer_is_thrown_away_and_its_engine_taken_out(
    how: str, gateway: Gateway, upstream: Upstream, tmp_path: Path
):
    acme = await gateway.tenant("acme", requests_per_minute=2, tokens_per_minute=100)
    if how == "mixed":
        got = await acme.complete(stream=True, max_tokens=90, x_engine={"tokens": 5, "mixed_after": 3})
        assert got.status == 200
        assert got.events[-1]["error"]["code"] == "adapter_mismatch"
        served = "mixed"
    else:
        upstream.receipt = OTHER
        got = await acme.complete(stream=how == "stream", max_tokens=90)
        assert (got.status, got.error["code"]) == (500, "adapter_mismatch")
        served = OTHER.removeprefix("sha256:")
    row = await row_of(gateway, tmp_path, got.headers["x-request-id"])
    assert (row.served_digest, row.status, row.prompt_tokens, row.completion_tokens) == (served, "error", 0, 0)
    page = (await gateway.admin.get("/metrics")).body.decode()
    assert f'loraplex_gateway_adapter_mismatches_total{{engine="{upstream.url}"}} 1.0' in page

    await gateway.engines_up(0)
    assert (await acme.complete()).error["code"] == "no_engine"
    # Further pushes of its state change nothing; a restart does.
    upstream.receipt, upstream.running = True, 7

    async def is_pushed() -> bool:
        [shown] = (await gateway.admin.get("/admin/api/engines")).json["data"]
        return bool(shown["state"]["running"] == 7)

    await until(is_pushed)
    await gateway.engines_up(0)
    upstream.instance = "two"
    await gateway.engines_up(1)
    # The failed requests took nothing of its limits.
    assert (await acme.complete(max_tokens=90)).status == 200


async def test_an_adapters_receipt(gateway: Gateway, upstream: Upstream, tmp_path: Path):
    acme = await gateway.tenant("acme")
    digest = (await push(acme, "mine", files())).json["digest"].removeprefix("sha256:")
    got = await acme.complete(model="mine")
    assert (got.status, got.headers[HEADER]) == (200, f"sha256:{digest}")
    assert (await row_of(gateway, tmp_path, got.headers["x-request-id"])).served_digest == digest
    upstream.receipt = "base"
    assert (await acme.complete(model="mine")).error["code"] == "adapter_mismatch"
