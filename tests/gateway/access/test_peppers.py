"""Rotation of the pepper: old keys go on working, also once the old pepper is gone, and the command counts the rest."""

import asyncio
import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.access.peppers import Peppers, fingerprint, split_peppers
from gateway.settings import Settings, SettingsError
from loraplex.cli import main
from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import Upstream

OLD, NEW = "4f1d9c0b7a62e85341d0", "b7e2805d6c19f3a4720e"


async def count(database_url: str, pepper: str) -> str:
    """Return the output of `loraplex key peppers`."""
    clean = {name: None for name in os.environ if name.startswith("LORAPLEX_")}
    env = clean | {"LORAPLEX_DATABASE_URL": database_url, "LORAPLEX_KEY_PEPPER": pepper}
    result = await asyncio.to_thread(CliRunner().invoke, main, ["key", "peppers"], env=env)
    assert result.exit_code == 0, result.output
    return result.output


async def test_keys_outlive_the_pepper_that_issued_them(
    database_url: str, tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
):
    def gateway(pepper: str) -> AbstractAsyncContextManager[Gateway]:
        given: dict[str, Any] = {"key_pepper": pepper, "database_url": database_url}
        return running(settings(tmp_path, model_dir, [upstream.url], redis_url, **given))

    async def stands(pepper: str, used: int) -> bool:
        expected = (
            f"2 valid keys; {used} use the new pepper {fingerprint(pepper.split(',')[0])}; {2 - used} need an old"
        )
        return expected in await count(database_url, pepper)

    async with gateway(OLD) as first:
        used, unused = [(await first.tenant(name)).key or "" for name in ("acme", "globex")]
    assert await stands(OLD, used=2)
    # With several gateways, all of them accept the new pepper before any of them uses it.
    async with gateway(f"{OLD},{NEW}") as ready:
        assert (await ready.client(used).chat()).status == 200
    assert await stands(OLD, used=2)
    assert await stands(f"{NEW},{OLD}", used=0)
    async with gateway(f"{NEW},{OLD}") as rotating:
        for _ in range(3):
            assert (await rotating.client(used).chat()).status == 200
        await until(lambda: stands(f"{NEW},{OLD}", used=1))
        assert (await rotating.client(used).chat()).status == 200
        third = (await rotating.tenant("initech")).key or ""
    async with gateway(f"{OLD},{NEW}") as late:
        assert (await late.client(third).chat()).status == 200
        assert (await late.client(used).chat()).status == 200
    async with gateway(f"{NEW},{OLD}") as rotating:
        for key in (used, third):
            assert (await rotating.client(key).chat()).status == 200
        await until(lambda: _says(database_url, "3 valid keys; 2 use the new pepper"))
    async with gateway(NEW) as rotated:
        for key in (used, third):
            assert (await rotated.client(key).chat()).status == 200
        # The hashes and the check digits of others stay wrong.
        for wrong in (unused, used[:-1] + ("0" if used[-1] != "0" else "1"), used[:21] + third[21:]):
            assert (await rotated.client(wrong).chat()).status == 401


async def _says(database_url: str, text: str) -> bool:
    return text in await count(database_url, f"{NEW},{OLD}")


def test_the_check_digits_of_a_key_are_those_of_either_pepper_or_recorded_ones():
    old, new, both = Peppers(OLD), Peppers(NEW), Peppers(f"{NEW}, {OLD}")
    digits = old.check("id", "random")
    assert both.check("id", "random") == new.check("id", "random") != digits
    assert both.is_check("id", "random", digits, None)
    assert not new.is_check("id", "random", digits, None)
    assert new.is_check("id", "random", digits, digits)
    assert not new.is_check("id", "random", "0" * 8, digits)
    assert both.match("id", "text", old.hash("id", "text")) == fingerprint(OLD)
    assert new.match("id", "text", old.hash("id", "text")) is None


@pytest.mark.parametrize("one", [OLD, f"{OLD},", f"{OLD},short", f"{OLD},{NEW},{OLD}"])
def test_a_comma_within_one_pepper_belongs_to_it(one: str):
    assert split_peppers(one) == (one,)


def test_both_peppers_are_hard_to_guess():
    with pytest.raises(SettingsError, match="LORAPLEX_KEY_PEPPER: expected a random secret") as refused:
        Settings.load({"LORAPLEX_KEY_PEPPER": f"{NEW},aaaaaaaaaaaaaaaaaaaa"})
    assert NEW not in str(refused.value)
