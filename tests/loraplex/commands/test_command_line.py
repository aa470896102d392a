"""The operators' commands against a real gateway."""

import asyncio
import csv
import fcntl
import io
import json
import os
import pty
import re
import signal
import sys
import termios
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest

from testing.adapter_files import tensors, write
from testing.gateway.commands import Run, runner
from testing.gateway.running import ADMIN_KEY, BASE_MODEL, Gateway, until
from testing.gateway.upstream import TOKEN, Upstream


@pytest.fixture
def run(gateway: Gateway) -> Run:
    return runner(gateway)


async def test_a_tenant_from_create_to_delete(run: Run, gateway: Gateway):
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "none", "--budget-per-month", "12.50")
    others = ("--priority", "2", "--weight", "1.5", "--on-token-limit", "shorten", "--ttft-target", "0.5")
    of_models = ("--model-limits", '{"base": {"max_concurrent": 1, "budget_per_month": 2.50}}')
    await run("tenant", "create", "initech", *limits, *others, *of_models)
    shown = json.loads((await run("tenant", "show", "initech", "--json")).stdout)
    assert shown.pop("left")["requests_per_minute"]["remaining"] == 60
    expected = {
        "name": "initech",
        "requests_per_minute": 60,
        "tokens_per_minute": None,
        "max_concurrent": 32,
        "budget_per_month": 12_500_000,
        "priority": 2,
        "weight": 1.5,
        "ttft_target": 0.5,
        "on_token_limit": "shorten",
        "model_limits": {"base": {"max_concurrent": 1, "budget_per_month": 2_500_000}},
        "suspended": False,
    }
    assert shown | expected == shown
    done = await run("tenant", "update", "initech", "--requests-per-minute", "none", "--tokens-per-day", "1000")
    assert done.stdout == "updated tenant initech: requests_per_minute, tokens_per_day\n"
    changed = {"requests_per_minute": None, "tokens_per_day": 1000, "budget_per_month": 12_500_000}
    [listed] = json.loads((await run("tenant", "list", "--json")).stdout)
    assert listed | {"sources": None} == shown | changed | {"sources": None}
    assert (listed["sources"]["tokens_per_day"], listed["sources"]["max_concurrent"]) == ("tenant", "default")
    shown_text = (await run("tenant", "show", "initech")).stdout.partition("\n\n")[0]
    lines = dict(line.split(maxsplit=1) for line in shown_text.splitlines())
    fields = {"name": "initech", "suspended": "no", "requests_per_minute": "-", "budget_per_month": "12.50"}
    shown_now = {name: re.sub(" +(tenant|-)$", "", value).strip() for name, value in lines.items()}
    assert shown_now | fields == shown_now
    assert shown_now["model_limits"].split() == ["of", "base", "max_concurrent=1,budget_per_month=2.50"]

    key = (await run("key", "create", "initech")).stdout.strip()
    await run("tenant", "suspend", "initech")
    assert (await gateway.client(key).chat()).error["code"] == "tenant_suspended"
    head, row = (await run("tenant", "list")).stdout.splitlines()
    cells = dict(zip(head.split(), row.split(), strict=True))
    expected = {"NAME": "initech", "SUSPENDED": "yes", "PRIORITY": "2", "WEIGHT": "1.5", "ON_TOKEN_LIMIT": "shorten"}
    assert cells | expected | {"TOKENS_PER_DAY": "1000", "BUDGET_PER_MONTH": "12.50"} == cells
    await run("tenant", "resume", "initech")
    assert (await gateway.client(key).chat()).status == 200

    kept = await run("tenant", "delete", "initech", input="y\n", code=2)
    assert kept.stderr == "Error: nothing was deleted: without a terminal, --yes is required\n"
    await run("tenant", "delete", "initech", "--yes")
    gone = await run("tenant", "show", "initech", code=1)
    assert gone.stderr == "Error: There is no tenant 'initech'.\n"


async def test_adapters_of_a_tenant_by_itself_and_by_an_operator(run: Run, gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme")
    folder = write(tmp_path / "adapter")
    for whose in (("--tenant", "acme"), ("--api-key", acme.key or "")):
        assert "pushed pirate version" in (await run("adapter", "push", "pirate", str(folder), *whose)).stdout
        assert "pirate" in (await run("adapter", "list", *whose)).stdout
        await run("adapter", "delete", "pirate", "--yes", *whose)
        assert "pirate" not in (await run("adapter", "list", *whose)).stdout
    asked = await run("adapter", "delete", "pirate", "--tenant", "acme", input="y\n", code=2)
    assert asked.stderr == "Error: nothing was deleted: without a terminal, --yes is required\n"
    missing = await run("adapter", "delete", "../x", "--yes", "--tenant", "acme", code=1)
    assert missing.stderr == "Error: There is no adapter '../x'.\n"


async def test_versions_and_aliases(run: Run, gateway: Gateway, tmp_path: Path):
    whose = ("--api-key", (await gateway.tenant("acme")).key or "")
    for seed in (0, 1):
        folder = write(tmp_path / f"adapter-{seed}", tensors(seed=seed))
        pushed = await run("adapter", "push", "pirate", str(folder), *whose)
        assert f"pushed pirate version {seed + 1}" in pushed.stdout
    assert (await run("adapter", "alias", "pirate:prod", "1", *whose)).stdout == "pirate:prod is pirate@1\n"
    moved = await run("adapter", "alias", "pirate:prod", "1=95", "2=5", *whose)
    assert moved.stdout == "pirate:prod is pirate@1=95,pirate@2=5\n"
    lines = (await run("adapter", "aliases", "pirate", *whose)).stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["latest", "2", "1"], ["prod", "1=95,2=5", "1"]]
    etag = lines[2].split()[3]
    await run("adapter", "alias", "pirate:prod", "1=95", "2=5", "--etag", etag, *whose)
    await run("adapter", "rollback", "pirate:prod", *whose)
    await run("adapter", "alias", "pirate:prod", "1=95", "2=5", *whose)
    some = await run("adapter", "alias", "pirate:prod", "1=95", "2", *whose, code=2)
    assert "expected a weight for each version" in some.stderr
    unknown = await run("adapter", "alias", "pirate:prod", "9", *whose, code=1)
    assert unknown.stderr == "Error: targets: pirate@9 is unknown; expected a ready version.\n"
    lost = await run("adapter", "alias", "pirate:prod", "2", "--etag", '"x"', *whose, code=1)
    assert "The alias has been changed: pirate:prod is version 1 (95 %), 2 (5 %), its ETag" in lost.stderr
    assert (await run("adapter", "rollback", "pirate:prod", *whose)).stdout == "pirate:prod is pirate@1\n"
    used = await run("adapter", "delete", "pirate@1", "--yes", *whose, code=1)
    assert "pirate@1 is in use by alias 'prod'. First move or delete the alias, or use --force" in used.stderr
    expiring = await run("adapter", "change", "pirate@1", "--expires", "1d", *whose)
    assert re.fullmatch(r"pirate@1 is ready, until 20\d\d-.*Z\n", expiring.stdout)
    changed = await run("adapter", "change", "pirate@1", "--expires", "never", *whose)
    assert changed.stdout == "pirate@1 is ready\n"
    refused = await run("adapter", "delete", "pirate:prod", "--yes", "--force", *whose, code=2)
    assert "pirate:prod is an alias" in refused.stderr
    for text in ("pirate:prod*0.5", "pirate@2*1"):
        assert (await run("adapter", "mix", "blend", text, *whose)).stdout == f"blend is {text}\n"
    listed = (await run("adapter", "mixtures", *whose)).stdout.split()
    assert listed[:5] == ["NAME", "MODEL", "ETAG", "blend", "pirate@2*1"]
    assert (await run("adapter", "mix", "blend", "pirate@2*2", "--etag", listed[5], *whose)).stdout
    await run("adapter", "unmix", "blend", *whose)
    await run("adapter", "unalias", "pirate:prod", *whose)
    await run("adapter", "delete", "pirate@1", "--yes", *whose)
    await run("adapter", "change", "pirate@2", "--state", "retired", "--force", *whose)
    lines = (await run("adapter", "versions", "pirate", *whose)).stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["1", "deleted"], ["2", "retired"]]
    assert "expected a value" in (await run("adapter", "change", "pirate@2", *whose, code=2)).stderr
    assert "is not a version like" in (await run("adapter", "change", "pirate", *whose, code=2)).stderr
    assert "is not an alias like" in (await run("adapter", "rollback", "a@1", *whose, code=2)).stderr
    assert "is not a version like 3" in (await run("adapter", "alias", "a:b", "x=1", *whose, code=2)).stderr
    await run("adapter", "delete", "pirate", "--yes", *whose)


async def test_a_new_mixture_or_alias_leaves_no_refused_request(run: Run, gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme")
    whose = ("--api-key", acme.key or "")
    await run("adapter", "push", "pirate", str(write(tmp_path / "adapter")), *whose)
    for weight in ("1", "2"):
        await run("adapter", "mix", "blend", f"pirate*{weight}", *whose)
        await run("adapter", "alias", "pirate:prod", "1", *whose)
    assert (await acme.get("/v1/mixtures/nobodys")).status == 404

    async def refused() -> list[int]:
        rows = (await gateway.admin.get("/admin/api/requests?tenant=acme")).json["data"]
        return [row["http_status"] for row in rows if row["http_status"] == 404]

    async def is_logged() -> bool:
        return bool(await refused())

    await until(is_logged)
    # The last request is logged last.
    assert await refused() == [404]


async def test_prices_in_money_per_million_tokens(run: Run, gateway: Gateway):
    await gateway.tenant("acme")
    await run("price", "set", "acme/pirate", "--input", "0.50", "--output", "1.5", "--cached", "0.05", "--force")
    done = await run("price", "set", "*", "--input", "1", "--output", "2")
    assert done.stdout == "set the price of *: input 1.00, cached 1.00, output 2.00 USD per million tokens\n"
    listed = json.loads((await run("price", "list", "--json")).stdout)
    assert {row["model"]: (row["input"], row["cached"], row["output"]) for row in listed} == {
        "*": (1_000_000, 1_000_000, 2_000_000),
        "acme/pirate": (500_000, 50_000, 1_500_000),
    }
    head, *rows = (await run("price", "list")).stdout.splitlines()
    assert head.split() == ["MODEL", "INPUT", "CACHED", "OUTPUT", "CURRENCY", "UPDATED_AT"]
    expected = [["*", "1.00", "1.00", "2.00", "USD"], ["acme/pirate", "0.50", "0.05", "1.50", "USD"]]
    assert sorted(row.split()[:5] for row in rows) == expected
    changes = (await run("audit", "--action", "price")).stdout
    assert "input=0.50 cached=0.05 output=1.50" in changes.replace("  ", " ")
    await run("price", "delete", "acme/pirate")
    assert "acme/pirate" not in (await run("price", "list")).stdout


async def test_bench_shows_an_engine_the_internal_token(run: Run, upstream: Upstream, tmp_path: Path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    engine = ("bench", "--url", upstream.url, "--models", BASE_MODEL, "--n", "2", "--warmup", "0")
    (tmp_path / "wrong").write_text("not this one")
    assert "http 401" in (await run(*engine, "--internal-token-file", str(tmp_path / "wrong"), code=1)).stderr
    assert "/dev/null is empty" in (await run(*engine, "--internal-token-file", "/dev/null", code=2)).stderr
    await run(*engine, "--internal-token-file", str(tmp_path / "token"))
    assert len(upstream.requests) == 2


async def test_usage_of_one_tenant_of_all_and_by_a_tenant_itself(run: Run, gateway: Gateway):
    await run("price", "set", "base", "--input", "1", "--output", "2")
    clients = {name: await gateway.tenant(name) for name in ("acme", "globex")}
    for client in (clients["acme"], clients["acme"], clients["globex"]):
        assert (await client.complete()).status == 200

    async def table(*arguments: str) -> list[list[str]]:
        return [line.split() for line in (await run("usage", *arguments)).stdout.splitlines()]

    async def written() -> bool:
        return (await table())[-1][2] == "3"

    await until(written)
    head, acme, globex, total = await table()
    assert head == ["TENANT", "MODEL", "REQUESTS", "PROMPT_TOKENS", "CACHED_TOKENS", "COMPLETION_TOKENS", "COST_USD"]
    assert [acme[:3], globex[:3], total[:3]] == [["acme", "base", "2"], ["globex", "base", "1"], ["TOTAL", "-", "3"]]
    spent = [Decimal(row[6]) for row in (acme, globex, total)]
    assert 0 < spent[1] < spent[0] < spent[2] == spent[0] + spent[1]
    assert (await table("--tenant", "acme"))[1] == acme
    assert (await table("--api-key", clients["acme"].key or ""))[1] == acme
    assert (await table("--by", "tenant"))[1] == ["acme", *acme[2:]]

    by_key = (await table("--by", "key,day", "--tenant", "globex"))[1]
    today = datetime.now(UTC).date()
    assert by_key[:4] in [["globex", (clients["globex"].key or "").split("_")[1], "-", f"{day}"] for day in
                          (today, today - timedelta(days=1))]  # fmt: skip
    nothing = await run("usage", "--since", "2026-01-01", "--until", "2026-02-01T00:00:00+01:00")
    assert nothing.stderr == "usage from 2026-01-01T00:00:00Z to 2026-01-31T23:00:00Z\n"
    assert nothing.stdout.splitlines()[1].split() == ["TOTAL", "-", "0", "0", "0", "0", "0.00"]

    await run("tenant", "delete", "globex", "--yes")
    rows = list(csv.DictReader(io.StringIO((await run("usage", "--csv")).stdout)))
    assert [(row["tenant"], row["deleted"], row["model"]) for row in rows] == [
        ("acme", "false", "base"),
        ("globex", "true", "base"),
    ]
    assert [Decimal(row["cost"]) for row in rows] == spent[:2]
    answer = json.loads((await run("usage", "--json")).stdout)
    assert answer["total"]["cost_micros"] == spent[2] * 1_000_000
    assert (answer["total"]["cost"], answer["currency"]) == (f"{spent[2]}", "USD")
    assert [row["currency"] for row in rows] == ["USD", "USD"]
    assert (await table())[2][:3] == ["globex", "(deleted)", "base"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tenant", "create", "x", "--requests-per-minute", "20M"), "requests_per_minute: expected an integer"),
        (("tenant", "create", "x", "--model-limits", '{"m": {"weight": 1}}'), "model_limits.m.weight: there is no"),
        (("tenant", "create", "x", "--model-limits", '{"m": {}}'), "a new tenant has no model 'm', only: base."),
        (("tenant", "suspend", "nobody"), "There is no tenant 'nobody'."),
        (("key", "create", "nobody"), "There is no tenant 'nobody'."),
        (("key", "create", "--admin", "--models", "m"), "allowed_models: there is no such field."),
        (("key", "rotate", "0" * 16), "There is no key with the id '0000000000000000'."),
        (("price", "set", "m", "--input", "0", "--output", "1"), "'m' is neither a base model ('base') nor '*'"),
        (("price", "delete", "m"), "m"),
        (("usage", "--tenant", "nobody"), "There is no tenant 'nobody'."),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_the_gateway_refuses_is_one_line(arguments: tuple[str, ...], says: str, shared_gateway: Gateway):
    [line] = (await runner(shared_gateway)(*arguments, code=1)).stderr.splitlines()
    assert line.startswith("Error: ")
    assert says in line


async def test_a_plan_from_set_to_delete(run: Run, gateway: Gateway):
    made = await run("plan", "set", "pro", "--tokens-per-minute", "60000", "--budget-per-month", "50", "--weight", "2",
                     "--price", "*=0.20,0.60,0.02", "--price", "*/*=0.40,1.20")  # fmt: skip
    assert made.stdout == "set plan pro; 0 tenants have it\n"
    await run("tenant", "create", "hooli", "--plan", "pro", "--weight", "3", "--tags", "eu,trial", "--note", "n n")
    changed = await run("plan", "set", "pro", "--reset", "tokens-per-minute", "--price", "*/*=none", "--priority", "3")
    assert changed.stdout == "set plan pro; 1 tenant has it\n"
    shown = (await run("plan", "show", "pro")).stdout
    assert re.search(r"^budget_per_month +50.00 +plan$", shown, re.MULTILINE)
    assert re.search(r"^tokens_per_minute +200000 +default$", shown, re.MULTILINE)
    assert re.search(r"^price of \* +input=0.20,cached=0.02,output=0.60 +-$", shown, re.MULTILINE)
    assert "*/*" not in shown
    head, row = (await run("plan", "list")).stdout.splitlines()
    assert dict(zip(head.split(), row.split(), strict=False))["BUDGET_PER_MONTH"] == "50.00"
    shown = (await run("tenant", "show", "hooli")).stdout
    assert re.search(r"^weight +3.0 +tenant$", shown, re.MULTILINE)
    assert re.search(r"^priority +3 +plan$", shown, re.MULTILINE)
    await run("tenant", "update", "hooli", "--inherit", "all", "--tags", "none")
    assert re.search(r"^weight +2.0 +plan$", (await run("tenant", "show", "hooli")).stdout, re.MULTILINE)
    kept = await run("plan", "delete", "pro", code=1)
    assert kept.stderr == "Error: The plan 'pro' cannot be deleted: 1 tenant has it. Give them another plan first.\n"
    await run("tenant", "update", "hooli", "--plan", "none")
    await run("plan", "delete", "pro")
    wrong = await run("plan", "set", "pro", "--price", "*=1", code=2)
    assert "MODEL=INPUT,OUTPUT" in wrong.stderr


async def test_usage_of_all_tenants_is_sorted_by_cost(run: Run, gateway: Gateway):
    await run("price", "set", "base", "--input", "0", "--output", "1")
    for name, requests, tokens in (("amber", 2, 1), ("blue", 1, 9), ("coral", 3, 1)):
        client = await gateway.tenant(name)
        for _ in range(requests):
            assert (await client.complete(max_tokens=tokens, x_engine={"tokens": tokens})).status == 200

    async def first(*arguments: str) -> list[str]:
        lines = (await run("usage", "--by", "tenant", *arguments)).stdout.splitlines()
        return [line.split()[0] for line in lines[1:-1]]

    async def written() -> bool:
        return (await run("usage", "--by", "tenant")).stdout.splitlines()[-1].split()[1] == "6"

    await until(written)
    assert await first() == ["blue", "coral", "amber"]
    assert await first("--sort", "requests") == ["coral", "amber", "blue"]
    assert await first("--sort", "tenant", "--top", "2") == ["amber", "blue"]
    total = (await run("usage", "--by", "tenant", "--top", "1")).stdout.splitlines()[-1].split()
    assert total[:2] == ["TOTAL", "6"], "the total is of all tenants"


async def test_status_and_top_show_the_service(run: Run, gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme")
    assert (await acme.complete(x_engine={"tokens": 60}, max_tokens=60)).status == 200
    lines = (await run("status")).stdout.splitlines()
    assert re.fullmatch(rf"gateway {gateway.url}, version \S+: ready", lines[0])
    assert "  database        ok" in lines
    assert any(line.startswith(upstream.url) and " up " in line for line in lines)
    assert (
        lines[-1]
        == "queue: 0 waiting (0 in the gateway, 0 on engines); 0 requests of this gateway process are on engines"
    )
    assert json.loads((await run("status", "--json")).stdout)["ready"]["parts"]["redis"] == "ok"

    async def shown() -> list[str]:
        found = (await run("top", "--once")).stdout.splitlines()
        return [line for line in found if line.startswith("acme ")]

    await until(shown)
    [row] = await shown()
    assert row.split()[1] == "1.0", "60 tokens in 60 seconds"
    upstream.healthy = False

    async def is_down() -> bool:
        return "engines none is up" in (await run("top", "--once")).stdout.splitlines()[0]

    await until(is_down)


@pytest.mark.parametrize("ended_by", [b"q", b"\x03"])
async def test_top_in_a_terminal_ends_with_q_or_ctrl_c(ended_by: bytes, gateway: Gateway):
    parent, child = pty.openpty()
    env = os.environ | {"LORAPLEX_GATEWAY": gateway.url, "LORAPLEX_ADMIN_KEY": ADMIN_KEY}
    command = (sys.executable, "-m", "loraplex.cli", "top", "--interval", "60")
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=child, stdout=asyncio.subprocess.PIPE, env=env, preexec_fn=partial(_take_terminal, child)
        )
        assert process.stdout is not None
        frame = await asyncio.wait_for(process.stdout.readuntil(b"q: end"), 60)
        assert b"output tokens/s" in frame

        async def is_ended() -> bool:
            # Pressed again, as a person would.
            os.write(parent, ended_by)
            await asyncio.wait({ended}, timeout=5)
            return ended.done()

        ended = asyncio.ensure_future(process.wait())
        await until(is_ended)
        assert ended.result() == 0
    finally:
        os.close(parent)
        os.close(child)


def _take_terminal(terminal: int) -> None:
    """Make this the process's controlling terminal, so that Ctrl-C interrupts it."""
    # A shell starts its background jobs, and so their children, with this signal ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
