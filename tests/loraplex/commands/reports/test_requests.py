"""`loraplex requests` against a running gateway: as an operator and with a tenant's own key."""

import asyncio
import csv
import io
import json
import os
import signal
import sys

import pytest

from testing.gateway.commands import Run, runner
from testing.gateway.running import ADMIN_KEY, Gateway, until


@pytest.fixture
def run(gateway: Gateway) -> Run:
    return runner(gateway)


async def test_requests_as_a_table_as_csv_and_one_by_one(run: Run, gateway: Gateway):
    acme, globex = await gateway.tenant("acme", requests_per_minute=1), await gateway.tenant("globex")
    served = await acme.chat(user="ann")
    assert (await acme.chat()).status == 429
    await globex.complete()

    async def rows(*arguments: str) -> list[list[str]]:
        return [line.split() for line in (await run("requests", *arguments)).stdout.splitlines()[1:]]

    async def written() -> bool:
        return len(await rows()) == 3

    await until(written)
    assert {row[2] for row in await rows()} == {"acme", "globex"}
    [[_, request_id, tenant, model, status, code, *_]] = await rows("--tenant", "acme", "--status", "ok")
    assert (request_id, tenant, model, status, code) == (served.headers["x-request-id"], "acme", "base", "ok", "-")
    own = ("--api-key", acme.key or "")
    assert [row[4:6] for row in await rows(*own)] == [["not_admitted", "rate_limit_exceeded"], ["ok", "-"]]
    page = await run("requests", "--limit", "2")
    after = page.stderr.split()[-1]
    assert [row[1] for row in await rows("--after", after)] == [request_id]
    table = list(csv.DictReader(io.StringIO((await run("requests", "--csv", "--end-user", "ann")).stdout)))
    assert [(row["end_user"], row["key_id"]) for row in table] == [("ann", (acme.key or "").split("_")[1])]

    story = (await run("requests", "show", served.json["id"], *own)).stdout
    assert "latency_ms:" in story
    assert "queue:" in story
    assert "http://" not in story
    [refused] = json.loads((await run("requests", "--code", "rate_limit_exceeded", "--json")).stdout)["data"]
    shown = (await run("requests", "show", refused["request_id"])).stdout
    assert "requests_per_minute of the tenant: 1" in shown
    assert "needed 1, remaining 0" in shown
    assert "no such request" in (await run("requests", "show", "req_none", code=1)).stderr
    assert "--engine is for operators" in (await run("requests", "--engine", "http://e", *own, code=2)).stderr


async def test_follow_prints_each_request_once_until_interrupted(gateway: Gateway):
    acme, globex = await gateway.tenant("acme", requests_per_minute=2), await gateway.tenant("globex")
    first = (await acme.chat()).headers["x-request-id"]

    async def written() -> bool:
        return bool((await gateway.admin.get("/admin/api/requests")).json["data"])

    await until(written)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    where = ("--gateway", gateway.url, "--admin-key", ADMIN_KEY, "--tenant", "acme")
    # A shell without job control starts what runs in its background with SIGINT ignored, and children inherit that.
    default = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{default}; from loraplex.cli import main; main()"
    command = (sys.executable, "-c", program, "requests", "--follow", "--json", *where)
    process = await asyncio.create_subprocess_exec(*command, env=clean, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            lines = [json.loads(await process.stdout.readline())]
            await globex.chat()
            second, refused = await acme.chat(), await acme.chat()
            assert (second.status, refused.status) == (200, 429)
            lines += [json.loads(await process.stdout.readline()) for _ in range(2)]
            process.send_signal(signal.SIGINT)
            rest = await process.stdout.read()
            assert await process.wait() == 130
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert lines[0]["request_id"] == first
    assert {line["request_id"] for line in lines[1:]} == {a.headers["x-request-id"] for a in (second, refused)}
    assert rest == b""


async def test_texts_of_tenants_are_no_formulas_in_csv(run: Run, gateway: Gateway):
    acme = await gateway.tenant("acme")
    await acme.chat(user="=1+1")

    async def table() -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO((await run("requests", "--csv")).stdout)))

    await until(table)
    assert [row["end_user"] for row in await table()] == ["'=1+1"]
