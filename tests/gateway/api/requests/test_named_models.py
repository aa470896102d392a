"""An operator's typing error in a model name is refused; a model that will come later can be forced."""

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from testing.adapter_files import write
from testing.gateway.running import BASE_MODEL, Answer, Gateway

PRICE = {"input": 1, "output": 2}
# Calls that name a model, for a tenant acme with the base model and the adapter pirate.
CALLS = {
    "allowed_models": ("POST", "/admin/api/tenants/acme/keys", lambda model: {"allowed_models": [BASE_MODEL, model]}),
    "model_limits": (
        "PATCH",
        "/admin/api/tenants/acme",
        lambda model: {"model_limits": {model: {"max_concurrent": 1}}},
    ),
}


async def push(gateway: Gateway, folder: Path) -> None:
    form: dict[str, Any] = {"name": "pirate"}
    files = {path.name: BytesIO(path.read_bytes()) for path in write(folder).iterdir()}
    answer = await gateway.admin.call("POST", "/admin/api/tenants/acme/adapters", data=form | files)
    assert answer.status == 201, answer.json


@pytest.mark.parametrize("param", CALLS)
async def test_a_tenants_model_must_exist_unless_forced(param: str, gateway: Gateway, tmp_path: Path):
    method, path, body = CALLS[param]

    async def call(model: str, query: str = "") -> Answer:
        return await gateway.admin.call(method, path + query, json=body(model))

    await gateway.tenant("acme")
    await push(gateway, tmp_path / "adapter")
    refused = await call("pirat")
    assert (refused.status, refused.error["param"], refused.error["code"]) == (400, param, "unknown_model")
    expected = f"{param}: tenant 'acme' has no model 'pirat', only: base, pirate. To accept a name that "
    assert refused.error["message"].startswith(expected)
    assert (await call("pirat", "?force=false")).status == 400
    for answer in (await call("pirate"), await call("pirat", "?force=true")):
        assert answer.status in (200, 201)
        assert "pirat" in str(answer.json[param])
    assert (await call("pirate", "?force=yes")).error["param"] == "force"


async def test_limits_of_a_model_that_is_gone_can_be_kept(gateway: Gateway, tmp_path: Path):
    limits = {"pirate": {"max_concurrent": 1}}
    new = {"name": "acme", "model_limits": limits}
    assert (await gateway.admin.post("/admin/api/tenants", new)).error["code"] == "unknown_model"
    assert (await gateway.admin.post("/admin/api/tenants?force=true", new)).status == 201
    for both in (limits, limits | {BASE_MODEL: {}}):
        assert (await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"model_limits": both})).status == 200
    assert (await gateway.admin.call("PATCH", "/admin/api/tenants/nobody", json={"model_limits": {}})).status == 404


async def test_a_priced_model_must_exist_unless_forced(gateway: Gateway, tmp_path: Path):
    async def put(model: str) -> Answer:
        return await gateway.admin.call("PUT", f"/admin/api/prices/{model}", json=PRICE)

    await gateway.tenant("acme")
    await push(gateway, tmp_path / "adapter")
    for model in ("bass", "nobody/pirate", "acme/pirat", "acme/"):
        refused = await put(model)
        assert (refused.status, refused.error["param"], refused.error["code"]) == (400, "model", "unknown_model")
        assert (await put(f"{model}?force=true")).status == 200
    for model in (BASE_MODEL, "*", "acme/pirate", f"acme/{BASE_MODEL}"):
        assert (await put(model)).status == 200


async def test_what_is_wrong_with_a_models_limits_names_the_model(gateway: Gateway):
    for limits, field, says in (
        ({"max_concurrent": 0}, "max_concurrent", "expected an integer of at least 1"),
        ({"max_concurrent": "1"}, "max_concurrent", "expected an integer or null, got a string"),
        ({"weight": 1}, "weight", "there is no such field"),
    ):
        body = {"name": "acme", "model_limits": {BASE_MODEL: {}, "pirate": limits}}
        error = (await gateway.admin.post("/admin/api/tenants", body)).error
        assert error["param"] == f"model_limits.pirate.{field}"
        assert error["message"] == f"model_limits.pirate.{field}: {says}."
    error = (await gateway.admin.post("/admin/api/tenants", {"name": "acme", "model_limits": {"pirate": 7}})).error
    assert error["message"] == "model_limits.pirate: expected an object, got an integer."
    error = (await gateway.admin.post("/admin/api/tenants", {"name": "acme", "model_limits": {"m" * 257: {}}})).error
    assert error["message"] == "model_limits: expected a string of at most 256 characters."


@pytest.mark.parametrize(
    "body",
    [
        '{"model_limits": {"m": {"x": 1}}',
        '{"model_limits": {"m": {"x": 1}}, "model_limits": 3}',
        '{"model_limits": {"m": {"x": 1}, "m": {}}}',
    ],
)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.usefixtures("shared_tenant")
async def test_a_body_that_has_no_such_model_in_the_end_is_refused_as_well(body: str, shared_gateway: Gateway):
    refused = await shared_gateway.admin.call("PATCH", "/admin/api/tenants/shared", data=body)
    assert (refused.status, refused.error["message"]) == (400, "model_limits[...].x: there is no such field.")
