"""Each route of the admin API is used by a command, or is on a short list with the reason why not."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from gateway.route_table import ROUTES
from loraplex import resumable_push
from testing.adapter_files import tensors, write
from testing.gateway.commands import runner
from testing.gateway.running import Gateway
from testing.gateway.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
API = "/admin/api"
TENANT = f"{API}/tenants/{{tenant}}"
ADAPTER = f"{TENANT}/adapters/{{name}}"
OF_ACME = ("--tenant", "acme")

# A command that sends the request, by the route. URL stands for the engine's URL, ID for the id of a request.
COMMANDS: dict[str, tuple[str, ...]] = {
    f"{API}/activity": ("activity", "--by", "model"),
    f"{API}/adapters": ("adapter", "list"),
    f"{API}/attention": ("attention",),
    f"{API}/audit": ("audit",),
    f"{API}/bases": ("base", "list"),
    f"{API}/engines": ("engine", "list"),
    f"{API}/engines/history": ("engine", "history", "URL"),
    f"{API}/events": ("events",),
    f"{API}/fairness": ("fairness",),
    f"{API}/keys": ("key", "list", "--admin"),
    f"{API}/plans": ("plan", "list"),
    f"{API}/plans/{{plan}}": ("plan", "show", "gold"),
    f"{API}/prices": ("price", "list"),
    f"{API}/quarantine": ("quarantine", "list"),
    f"{API}/queue": ("status",),
    f"{API}/refusals": ("refusals", "--status", "all"),
    f"{API}/requests": ("requests",),
    f"{API}/requests/{{id}}": ("requests", "show", "ID"),
    f"{API}/residency": ("residency",),
    f"{API}/search": ("search", "acm"),
    f"{API}/sessions": ("session", "list"),
    f"{API}/settings": ("settings",),
    f"{API}/tenants": ("tenant", "list"),
    TENANT: ("tenant", "show", "acme"),
    f"{TENANT}/adapters": ("adapter", "list", *OF_ACME),
    f"{TENANT}/keys": ("key", "list", "acme"),
    f"{TENANT}/limits": ("tenant", "show", "acme"),
    f"{TENANT}/mixtures": ("adapter", "mixtures", *OF_ACME),
    f"{TENANT}/mixtures/{{name}}": ("adapter", "mix", "blend", "pirate*0.4+other*0.6", *OF_ACME),
    f"{TENANT}/models": ("tenant", "models", "acme"),
    f"{ADAPTER}/aliases": ("adapter", "aliases", "pirate", *OF_ACME),
    f"{ADAPTER}/aliases/{{alias}}": ("adapter", "alias", "pirate:prod", "1", *OF_ACME),
    f"{ADAPTER}/use": ("adapter", "use", "pirate", *OF_ACME),
    f"{ADAPTER}/versions": ("adapter", "versions", "pirate", *OF_ACME),
    f"{ADAPTER}/versions/{{version}}/golden": ("adapter", "verify", "pirate@1", *OF_ACME),
    f"{ADAPTER}/versions/{{version}}/probe": ("adapter", "verify", "pirate@1", *OF_ACME),
    f"{TENANT}/adapter-uploads": ("adapter", "push", "pirate", "PIRATE", *OF_ACME),
    f"{API}/usage": ("usage",),
    f"{API}/usage/export": ("usage", "--export", "csv", "--out", "FILE"),
    f"{API}/usage/rows": ("usage", "export", "FILE", "--csv"),
    f"{API}/version": ("status",),
    f"{API}/webhooks": ("webhook", "list"),
    f"{API}/webhooks/{{name}}": ("webhook", "show", "pager"),
}
REASONS = {
    f"{TENANT}/adapter-uploads/{{id}}": "a push reads it only if the answer to one of its parts was lost",
    f"{ADAPTER}/versions/{{version}}": "`adapter versions` lists the same fields of every version",
}


# Commands that send the requests of changes, one after the other, by method and route. KEY and SESSION stand for ids,
# DRILL for a folder with an adapter, PROMPTS for a file, MODEL for the folder of a base model.
PARTS = ("adapter push parts DRILL --tenant acme",)
VERIFY = ("adapter verify drill@1 --tenant acme",)
CHANGES: dict[tuple[str, str], tuple[str, ...]] = {
    ("POST", f"{API}/tenants"): ("tenant create globex",),
    ("PATCH", TENANT): ("tenant update globex --weight 2",),
    ("POST", f"{API}/tenants/bulk"): ("tenant bulk --everyone --add-tags eu --yes",),
    ("POST", f"{TENANT}/keys"): ("key create globex --label ci",),
    ("POST", f"{API}/keys"): ("key create --admin --role viewer",),
    ("DELETE", f"{API}/sessions/{{id}}"): ("session end SESSION",),
    ("PATCH", f"{API}/keys/{{id}}"): ("key update KEY --label ci",),
    ("POST", f"{API}/keys/{{id}}/rotate"): ("key rotate KEY",),
    ("DELETE", f"{API}/keys/{{id}}"): ("key revoke KEY",),
    ("POST", f"{TENANT}/adapters"): ("adapter push drill DRILL --tenant acme",),
    ("POST", f"{TENANT}/adapter-uploads"): PARTS,
    ("PUT", f"{TENANT}/adapter-uploads/{{id}}"): PARTS,
    ("POST", f"{TENANT}/adapter-uploads/{{id}}/complete"): PARTS,
    ("POST", f"{TENANT}/adapter-imports"): ("adapter import pulled hf://org/pirate --tenant acme",),
    ("PATCH", f"{ADAPTER}/versions/{{version}}"): ("adapter change drill@1 --pin --tenant acme",),
    ("POST", f"{ADAPTER}/versions/{{version}}/prefetch"): ("adapter prefetch drill@1 --tenant acme --engine URL",),
    ("PUT", f"{ADAPTER}/versions/{{version}}/golden"): ("adapter golden set drill@1 PROMPTS --tenant acme",),
    ("POST", f"{ADAPTER}/versions/{{version}}/golden/check"): VERIFY,
    ("POST", f"{ADAPTER}/versions/{{version}}/probe"): VERIFY,
    ("DELETE", f"{ADAPTER}/versions/{{version}}/golden"): ("adapter golden rm drill@1 --tenant acme",),
    ("PUT", f"{ADAPTER}/aliases/{{alias}}"): ("adapter alias drill:prod 1 --tenant acme",),
    ("POST", f"{ADAPTER}/aliases/{{alias}}/rollback"): (
        "adapter push drill OTHER --tenant acme",
        "adapter alias drill:prod 2 --tenant acme",
        "adapter rollback drill:prod --tenant acme",
    ),
    ("DELETE", f"{ADAPTER}/aliases/{{alias}}"): ("adapter unalias drill:prod --tenant acme",),
    ("PUT", f"{TENANT}/mixtures/{{name}}"): ("adapter mix brew pirate*0.5+other*0.5 --tenant acme",),
    ("DELETE", f"{TENANT}/mixtures/{{name}}"): ("adapter unmix brew --tenant acme",),
    ("DELETE", f"{ADAPTER}/versions/{{version}}"): ("adapter delete drill@1 --yes --tenant acme",),
    ("DELETE", ADAPTER): ("adapter delete drill --yes --tenant acme",),
    ("POST", f"{API}/adapters/collect"): ("adapter gc",),
    ("POST", f"{API}/engines/drain"): ("engine drain URL",),
    ("POST", f"{API}/engines/resume"): ("engine resume URL",),
    ("DELETE", f"{TENANT}/quarantine"): ("quarantine clear globex",),
    ("POST", f"{API}/bases"): ("base add second --tokenizer MODEL",),
    ("PATCH", f"{API}/bases/{{name}}"): ("base drain second",),
    ("POST", f"{API}/usage/prune"): ("usage prune --before 2026-01-01",),
    ("PUT", f"{API}/webhooks/{{name}}"): ("webhook set second https://127.0.0.1:9/",),
    ("POST", f"{API}/webhooks/{{name}}/test"): ("webhook test second",),
    ("DELETE", f"{API}/webhooks/{{name}}"): ("webhook delete second",),
    ("PUT", f"{API}/plans/{{plan}}"): ("plan set silver --weight 2",),
    ("DELETE", f"{API}/plans/{{plan}}"): ("plan delete silver",),
    ("PUT", f"{API}/prices/{{model}}"): ("price set base --input 0.50 --output 1.50",),
    ("DELETE", f"{API}/prices/{{model}}"): ("price delete base",),
    ("DELETE", TENANT): ("tenant delete globex --yes",),
}
# Commands that fail here although they send the request, with the reason.
FAIL = {
    "adapter import pulled hf://org/pirate --tenant acme": "no source is allowed",
    "webhook test second": "nothing listens there",
}
CHANGE_REASONS = {
    ("DELETE", f"{TENANT}/adapter-uploads/{{id}}"): "the same push goes on later, and an upload that is left expires",
    ("PUT", f"{API}/plans/{{plan}}/prices"): "`plan set --price` sets the same; this route is for the role billing",
    **{
        ("POST", f"{TENANT}/{end}"): "the playground's; `chat` asks with a key of the tenant"
        for end in ("chat/completions", "completions")
    },
}


async def test_every_route_has_a_command_or_a_reason():
    routes = {
        (route.method, route.canonical) for route in ROUTES if f"{route.path}/".startswith(f"{API}/") and route.scope
    }
    reads = {route for method, route in routes if method == "GET"}
    assert len(reads) > 35
    assert sorted([*COMMANDS, *REASONS]) == sorted(reads)
    changes = {(method, route) for method, route in routes if method != "GET"}
    assert len(changes) > 40
    assert sorted([*CHANGES, *CHANGE_REASONS]) == sorted(changes)
    assert len(REASONS) + len(CHANGE_REASONS) <= 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def filled(
    shared_gateway: Gateway, shared_upstream: Upstream, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Gateway, dict[str, str]]]:
    """Return a gateway whose every record exists once, and the values of the words in capitals."""
    folder = tmp_path_factory.mktemp("adapters")
    run = runner(shared_gateway)
    shared_upstream.probe_status, shared_upstream.base_digest = 200, "b" * 64
    acme = await shared_gateway.tenant("acme")
    for seed, name in enumerate(("pirate", "other"), start=1):
        await run("adapter", "push", name, str(write(folder / name, tensors(seed=seed))), *OF_ACME)
    await run("adapter", "alias", "pirate:prod", "1", *OF_ACME)
    await run("adapter", "mix", "blend", "pirate*0.5+other*0.5", *OF_ACME)
    await run("plan", "set", "gold", "--requests-per-minute", "60")
    await run("webhook", "set", "pager", "https://alerts.example.com/loraplex")
    answer = await acme.chat()
    words = {"URL": shared_upstream.url, "ID": answer.headers["x-request-id"], "FILE": str(folder / "usage.csv")}
    words["PIRATE"] = str(folder / "pirate")

    async def written() -> bool:
        return (await shared_gateway.admin.get(f"{API}/requests/{words['ID']}")).status == 200

    deadline = asyncio.get_running_loop().time() + 30
    while not await written():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)
    yield shared_gateway, words


@pytest.fixture
def sent(filled: tuple[Gateway, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list to which the method and the path of each request are added."""
    found: list[tuple[str, str]] = []
    send = aiohttp.ClientSession._request

    async def noted(session: aiohttp.ClientSession, method: str, url: Any, **options: Any) -> aiohttp.ClientResponse:
        found.append((method, str(url).removeprefix(filled[0].url).split("?")[0]))
        return await send(session, method, url, **options)

    monkeypatch.setattr(aiohttp.ClientSession, "_request", noted)
    return found


def was_sent(sent: list[tuple[str, str]], method: str, route: str) -> bool:
    path = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(route))
    return any(each[0] == method and re.fullmatch(path, each[1]) for each in sent)


@pytest.mark.parametrize("route", COMMANDS)
async def test_the_command_sends_the_request(
    route: str, filled: tuple[Gateway, dict[str, str]], sent: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
):
    # Only the push of a large adapter reads the limits of uploads.
    monkeypatch.setattr(resumable_push, "MIN_BYTES", 0)
    gateway, words = filled
    await runner(gateway)(*(words.get(word, word) for word in COMMANDS[route]))
    assert was_sent(sent, "GET", route), sent


async def test_the_commands_send_each_change(
    filled: tuple[Gateway, dict[str, str]],
    sent: list[tuple[str, str]],
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    gateway, words = filled
    key = (await gateway.admin.post(f"{API}/keys", {"role": "viewer"})).json
    (tmp_path / "prompts.json").write_text('[{"prompt": "Hi", "max_tokens": 2}]')
    words = words | {"KEY": key["id"], "MODEL": str(model_dir), "PROMPTS": str(tmp_path / "prompts.json")}
    words |= {name: str(write(tmp_path / name, tensors(seed=seed))) for seed, name in ((3, "DRILL"), (4, "OTHER"))}
    run, done = runner(gateway), dict[str, list[tuple[str, str]]]()
    async with gateway.browser(key["key"]):
        [session] = (await gateway.admin.get(f"{API}/sessions")).json["data"]
    words["SESSION"] = session["id"]
    for (method, route), commands in CHANGES.items():
        for command in commands:
            if command not in done:
                # A small file is sent in parts too.
                monkeypatch.setattr(resumable_push, "MIN_BYTES", 0 if commands is PARTS else 2**30)
                sent.clear()
                await run(*(words.get(word, word) for word in command.split()), code=int(command in FAIL))
                done[command] = [*sent]
        assert was_sent(done[commands[-1]], method, route), (commands, done[commands[-1]])
