"""The secrets of full access: the bootstrap admin key, and the token that admits engines."""

from pathlib import Path

import pytest

from engine.http.announcing import announcing
from gateway.settings import OFF, SettingsError
from testing.gateway.running import ADMIN_KEY, running, settings, until
from testing.gateway.upstream import TOKEN, Upstream

ANNOUNCE = "tests-announce-0d94c7a1b35e62f8"


async def test_the_bootstrap_key_can_be_switched_off_once_another_exists(
    tmp_path: Path, model_dir: Path, redis_url: str, upstream: Upstream
):
    def of(admin_key: str):
        return settings(tmp_path, model_dir, [upstream.url], redis_url, admin_key=admin_key)

    with pytest.raises(SettingsError, match="LORAPLEX_ADMIN_KEY: is required while"):
        async with running(of(OFF)):
            pass
    async with running(of(ADMIN_KEY)) as gateway:
        made = (await gateway.admin.post("/admin/api/keys", {"label": "alice"})).json
        temporary = (await gateway.admin.post("/admin/api/keys", {"label": "bob"})).json
    async with running(of(OFF)) as gateway:
        for key in (ADMIN_KEY, OFF, "", "None"):
            assert (await gateway.client(key).get("/admin/api/tenants")).status == 401
        alice = gateway.client(made["key"])
        assert (await alice.get("/admin/api/tenants")).status == 200
        for key in (temporary, made):
            assert (await alice.call("DELETE", f"/admin/api/keys/{key['id']}")).status == 200
    # The last operator key is revoked: no key would open the admin API.
    with pytest.raises(SettingsError, match="LORAPLEX_ADMIN_KEY: is required while"):
        async with running(of(OFF)):
            pass


async def test_announcing_has_a_token_of_its_own(tmp_path: Path, model_dir: Path, redis_url: str, upstream: Upstream):
    """With an announce token, the internal token alone cannot make an engine receive tenants' prompts."""
    of = settings(tmp_path, model_dir, ["announced"], redis_url, announce_token=ANNOUNCE)
    async with running(of) as gateway:

        async def announced(header: str, token: str) -> int:
            return (
                await gateway.nobody.post("/internal/engines", {"url": upstream.url}, headers={header: token})
            ).status

        assert await announced("x-loraplex-internal-token", TOKEN) == 401
        assert await announced("x-loraplex-internal-token", ANNOUNCE) == 401
        assert await announced("x-loraplex-announce-token", TOKEN) == 401
        assert (await gateway.nobody.get("/readyz")).json["engines_up"] == 0
        async with announcing([gateway.url], upstream.url, TOKEN, ANNOUNCE):
            await gateway.engines_up(1)
        acme = await gateway.tenant("acme")

        async def gone() -> bool:
            return (await acme.complete()).status == 503

        await until(gone)
