"""Page of base models: their states, engines, adapters and prices, the acts, and their words in the audit log."""

import csv
import io
import re
from pathlib import Path

from testing.gateway.running import MODEL_CONFIG, Answer, Browser, Gateway, save_model, until

PAGE = "/admin/engines/bases"


def text(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return answer.body.decode()


async def rows(browser: Browser) -> dict[str, dict[str, str]]:
    """Return the table's rows by the base model's name."""
    found = csv.DictReader(io.StringIO(text(await browser.get(f"{PAGE}?format=csv"))))
    return {row["name"]: row for row in found}


async def test_a_base_model_from_its_form_to_its_retirement(gateway: Gateway, tmp_path: Path):
    folder, digest = str(save_model(tmp_path / "second", context=512)), "ab" * 32
    async with gateway.browser() as browser:
        assert (await rows(browser))["base"]["state"] == "serving"
        refused = await browser.submit(f"{PAGE}/new", name="base", tokenizer=folder)
        assert refused.status == 400
        assert "There is a base model" in refused.body.decode()
        fields = {
            "name": "org/second",
            "tokenizer": folder,
            "digest": digest,
            "price_input": "1.5",
            "price_output": "2",
        }
        added = await browser.submit(f"{PAGE}/new", **fields)
        assert added.headers["Location"] == f"{PAGE}?done=added"
        found = (await rows(browser))["org/second"]
        assert (found["state"], found["engines"], found["adapters"], found["context"]) == (
            *("without engines", "0", "0"),
            "512",
        )
        assert (found["input"], found["output"]) == ("1500000", "2000000")
        edit = f"{PAGE}/edit?name=org/second"
        same = {"tokenizer": folder, "digest": digest}
        assert (await browser.submit(edit, context_length="many", **same)).status == 400
        assert (await browser.submit(edit, context_length="128", **same)).status == 303
        assert (await rows(browser))["org/second"]["context"] == "128"

        # A drain needs the name, and an active base model cannot be retired.
        asked = text(await browser.get(f"{PAGE}/drain?name=org/second"))
        assert 'data-confirm="org/second"' in asked
        assert (await browser.submit(f"{PAGE}/drain", name="org/second", typed="second")).status == 400
        early = await browser.submit(f"{PAGE}/retire", name="org/second", typed="org/second")
        assert (early.status, b"drain it first" in early.body) == (400, True)
        for act, state in (("drain", "draining"), ("retire", "retired"), ("resume", "without engines")):
            done = await browser.submit(f"{PAGE}/{act}", name="org/second", typed="org/second")
            assert done.headers["Location"] == f"{PAGE}?done={act}", done.body
            assert (await rows(browser))["org/second"]["state"] == state
        assert (await browser.submit(f"{PAGE}/explode", name="base", typed="base")).status == 404
        assert (await browser.submit(f"{PAGE}/drain", name="other", typed="other")).status == 404
        page = text(await browser.get("/admin/audit"))
        assert "Base model added" in page
        assert "Base model changed" in page


async def test_what_the_settings_decide_is_refused(gateway: Gateway, tmp_path: Path):
    """Every gateway would go on with its own settings, and write them to the table at its next start."""
    edit, url = f"{PAGE}/edit?name=base", "/admin/api/bases/base"
    folder = str(save_model(tmp_path / "other", context=64))
    other_shape = MODEL_CONFIG | {"num_hidden_layers": 9}
    async with gateway.browser() as browser:
        before = (await rows(browser))["base"]["context"]
        refused = await browser.submit(edit, context_length="64")
        assert refused.status == 400
        assert "so gateways read it from LORAPLEX_MAX_MODEL_LEN" in refused.body.decode()
        for field, value in (("context_length", 64), ("tokenizer", folder), ("config", other_shape)):
            answer = await gateway.admin.call("PATCH", url, json={field: value})
            assert (answer.status, answer.error["param"]) == (400, field)
        assert (await rows(browser))["base"]["context"] == before
        for same in ({"context_length": int(before)}, {"config": MODEL_CONFIG}):
            assert (await gateway.admin.call("PATCH", url, json=same)).status == 200
        assert (await browser.submit(edit, digest="cd" * 32)).status == 303
        replaced = {"digest": "ef" * 32, "tokenizer": folder}
        assert (await gateway.admin.call("PATCH", url, json=replaced)).status == 200
        assert (await rows(browser))["base"]["digest"] == f"sha256:{'ef' * 32}"
        changed = (await gateway.admin.get("/admin/api/audit")).json["data"][0]
        assert changed["target"] == "base"
        assert "context_length" not in str(changed)


async def test_only_operators_act_on_base_models(gateway: Gateway):
    made = (await gateway.admin.post("/admin/api/keys", {"label": "v", "role": "viewer"})).json["key"]
    async with gateway.browser(made) as viewer:
        assert f"{PAGE}/drain" not in text(await viewer.get(PAGE))
        for path in ("new", "edit?name=base", "drain", "retire", "resume"):
            assert (await viewer.submit(f"{PAGE}/{path}", name="base", typed="base")).status == 403, path


async def test_the_engines_name_their_base_model(gateway: Gateway):
    async with gateway.browser() as browser:

        async def is_up() -> bool:
            return "state-good" in text(await browser.get("/admin/engines"))

        await until(is_up)
        assert re.search(r"<small>base · ", text(await browser.get("/admin/engines")))
        assert "No engine matches" in text(await browser.get("/admin/engines?q=another"))
        [row] = csv.DictReader(io.StringIO(text(await browser.get("/admin/engines?format=csv"))))
        assert row["base"] == "base"
        page = text(await browser.get(f"/admin/engines/one?url={row['url']}"))
        assert f'<a href="{PAGE}">base</a>' in page
        changes = text(await browser.get(f"/admin/engines/one?url={row['url']}&format=csv"))
        assert changes.splitlines()[0] == "at,state,reason"
        assert ",up," in changes
