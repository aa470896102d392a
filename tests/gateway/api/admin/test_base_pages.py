"""Pages of the list of base models, and the command that reads them all."""

import asyncio
import json
import os
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.api.admin import bases
from loraplex.cli import main
from testing.gateway.running import ADMIN_KEY, MODEL_CONFIG, Gateway

BASES = "/admin/api/bases"


async def test_pages_have_each_row_once(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    """The order is that of the whole list, and the command joins the pages."""
    for name, digest in (("b", "b" * 64), ("a", "a" * 64)):
        config = MODEL_CONFIG | {"max_position_embeddings": 128}
        assert (await gateway.admin.post(BASES, {"name": name, "digest": digest, "config": config})).status == 201
    assert (await gateway.admin.call("PATCH", f"{BASES}/b", json={"digest": "0" * 64})).status == 200
    whole = (await gateway.admin.get(BASES)).json
    rows = [(row["name"], (row["digest"] or "")[7:8]) for row in whole["data"]]
    assert rows == [("base", ""), ("b", "0"), ("b", "b"), ("a", "a")]
    assert (whole["total"], whole["next"]) == (4, None)

    found: list[Any] = []
    query = "limit=3"
    page = (await gateway.admin.get(f"{BASES}?{query}")).json
    assert (len(page["data"]), page["total"]) == (3, 4)
    found += page["data"]
    page = (await gateway.admin.get(f"{BASES}?{query}&after={page['next']}")).json
    assert (len(page["data"]), page["total"], page["next"]) == (1, 4, None)
    assert found + page["data"] == whole["data"]

    for wrong in ("limit=0", "limit=1001", "limit=x"):
        assert (await gateway.admin.get(f"{BASES}?{wrong}")).error["param"] == "limit"
    for wrong in ("after=x", "after=WzFd", "after=%00", "after="):
        assert (await gateway.admin.get(f"{BASES}?{wrong}")).error["param"] == "after"

    monkeypatch.setattr(bases, "MAX_ROWS", 1)
    assert len((await gateway.admin.get(BASES)).json["data"]) == 1
    clean = {name: None for name in os.environ if name.startswith("LORAPLEX_")}
    env = clean | {"LORAPLEX_GATEWAY": gateway.url, "LORAPLEX_ADMIN_KEY": ADMIN_KEY}
    listed = await asyncio.to_thread(CliRunner().invoke, main, ["base", "list", "--json"], env=env)
    assert json.loads(listed.stdout) == whole["data"]
