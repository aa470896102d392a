"""`loraplex base` and `--base` of uploads against a running gateway, with doubles of engines."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from loraplex.cli import main
from testing.adapter_files import write
from testing.gateway.running import ADMIN_KEY, MODEL_CONFIG, Gateway, running_alone, save_model, settings, until
from testing.gateway.upstream import Upstream

DIGESTS = {"qwen": "b" * 64, "newer": "c" * 64}


@pytest.fixture
async def engines(starts_servers: None) -> AsyncIterator[tuple[Upstream, Upstream]]:
    """Return engines of `base` and of `qwen`."""
    first, second = Upstream(), Upstream()
    second.model, second.base_digest = "qwen", DIGESTS["qwen"]
    async with first.serving(), second.serving():
        yield first, second


class Commands:
    def __init__(self, gateway: Gateway) -> None:
        clean = {name: None for name in os.environ if name.startswith("LORAPLEX_")}
        self._env = clean | {"LORAPLEX_GATEWAY": gateway.url, "LORAPLEX_ADMIN_KEY": ADMIN_KEY}

    async def __call__(self, *arguments: str, code: int = 0) -> str:
        result = await asyncio.to_thread(CliRunner().invoke, main, arguments, env=self._env)
        assert result.exit_code == code, result.output
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        return result.output

    async def json(self, *arguments: str) -> Any:
        return json.loads((await self(*arguments, "--json")).partition("\nnext:")[0])

    async def rows(self) -> dict[str, tuple[str, ...]]:
        """Return the rows of `base list` by name."""
        lines = (await self("base", "list")).splitlines()[1:]
        return {line.split()[0]: tuple(line.split()[1:]) for line in lines}


async def check_mistakes(run: Commands, own: Path, no_model: Path) -> None:
    """Each mistake has one line of error. own: the folder of the active base model `qwen`."""
    for wrong, expected in (
        (("add", "qwen", "--model", str(own)), "there is a base model 'qwen'"),
        (("add", "x", "--digest", "abc"), "digest: expected 64 hexadecimal digits"),
        (("add", "x", "--digest", "d" * 64), "config: expected the content of the model's config.json"),
        (("add", "x", "--model", str(no_model)), "No such file"),
        (("add", "x", "--model", str(own), "--digest", DIGESTS["qwen"]), "the digest of the base model 'qwen'"),
        (("add", "*", "--model", str(own)), "name: expected"),
        (("drain", "x"), "There is no base model 'x'"),
        (("retire", "qwen"), "'qwen' is active; drain it first"),
        (("retire", "sha256:dddd"), "no base model with the digest"),
    ):
        [line] = [each for each in (await run("base", *wrong, code=1)).splitlines() if each.startswith("Error")]
        assert expected in line


async def test_a_base_from_its_add_to_its_retirement(
    tmp_path: Path, model_dir: Path, redis_url: str, engines: tuple[Upstream, Upstream]
):
    first, second = engines
    own = save_model(tmp_path / "Qwen3", context=128)
    (own / "config.json").write_text(json.dumps(MODEL_CONFIG | {"max_position_embeddings": 128}))
    of = settings(tmp_path, model_dir, [first.url, second.url], redis_url, adapter_probe="off")
    async with running_alone(of) as gateway:
        run, acme = Commands(gateway), await gateway.tenant("acme")
        assert (await run.rows())["-"][:2] == ("unknown", f"sha256:{DIGESTS['qwen']}")
        assert "added" in await run(
            *("base", "add", "qwen", "--model", str(own), "--digest", f"sha256:{DIGESTS['qwen']}"),
            *("--input", "0.50", "--output", "2"),
        )

        async def is_up() -> bool:
            return second.url in (await run.rows())["qwen"]

        await until(is_up)
        assert (await acme.chat(model="qwen")).status == 200
        assert second.requests[-1][1]["model"] == "qwen"
        assert (await acme.chat(model="qwen", max_tokens=128)).error["code"] == "context_length_exceeded"

        await check_mistakes(run, own, tmp_path)

        folder = write(tmp_path / "pirate")
        unclear = await run("adapter", "push", "pirate", str(folder), "--tenant", "acme", code=1)
        assert "the adapter fits several base models: 'base', 'qwen'" in unclear
        refused = await run("adapter", "push", "pirate", str(folder), "--tenant", "acme", "--base", "none", code=1)
        assert "there is no base model 'none'; expected one of: 'base', 'qwen'" in refused
        await run("adapter", "push", "pirate", str(folder), "--tenant", "acme", "--base", "qwen")
        await run("adapter", "push", "poet", str(folder), "--tenant", "acme", "--base", "base")
        for name, engine in (("pirate", second), ("poet", first)):
            assert (await acme.chat(model=name)).status == 200
            assert engine.requests[-1][1]["model"].startswith("sha256:")
        cost = {row["model"]: row["cost"] for row in (await _usage(acme))}
        assert (float(cost["pirate"]) > 0, float(cost["poet"])) == (True, 0), "an adapter has its own base's price"

        replaced = await run.json("base", "replace", "qwen", "--digest", DIGESTS["newer"])
        assert replaced["digest"] == f"sha256:{DIGESTS['newer']}"
        assert (await acme.chat(model="qwen")).status == 200, "the former weights serve until the new ones are up"
        await run("base", "drain", "qwen")
        assert "qwen" not in (await acme.get("/v1/models")).body.decode().replace('"parent":"qwen"', "").replace(
            '"root":"qwen"', ""
        )
        assert (await acme.chat(model="qwen")).status == 200
        assert "acme/pirate@2" in await run("base", "retire", "qwen", code=1)
        await run("adapter", "delete", "pirate", "--tenant", "acme", "--yes")
        await run("base", "retire", "qwen")
        assert (await acme.chat(model="qwen")).error["code"] == "model_not_found"
        await run("base", "resume", "qwen")
        assert (await acme.chat(model="qwen")).status == 200
        audit = (await gateway.admin.get("/admin/api/audit?action=base.change")).json["data"]
        assert [each["detail"].get("state") for each in audit] == ["active", "retired", "draining", None]


async def _usage(client: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    async def written() -> bool:
        nonlocal found
        found = (await client.get("/v1/usage?group_by=model")).json["data"]
        return {"pirate", "poet"} <= {row["model"] for row in found}

    await until(written)
    return found
