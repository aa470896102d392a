"""Flags made from a configuration's fields."""

from dataclasses import dataclass
from typing import Any

import click
import pytest
from click.testing import CliRunner

from engine.config import EngineConfig
from loraplex.commands.config_options import options_of
from wire.options import option


@dataclass(frozen=True)
class Config:
    off: bool = option(False, help="Off unless it is given.", former="--former-off")
    on: bool = option(True, help="On unless it is refused.", former="--former-on")
    size: int = option(1, help="A number.", former="--former-size")


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        ([], {}),
        (["--off"], {"off": True}),
        (["--former-off"], {"off": True}),
        (["--no-on"], {"on": False}),
        (["--no-on", "--former-on"], {}),
        (["--size", "2"], {"size": 2}),
        (["--former-size", "2"], {"size": 2}),
    ],
)
def test_a_flag_is_accepted_by_its_former_name(arguments: list[str], changed: dict[str, Any]):
    found: dict[str, Any] = {}
    command = click.command()(options_of(Config)(lambda **flags: found.update(flags)))
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert found == {"off": False, "on": True, "size": 1} | changed


@pytest.mark.parametrize("flag", ["--engine-core-mode", "--core"])
@pytest.mark.parametrize("mode", ["process", "thread"])
def test_the_mode_of_the_core_is_set_by_its_flag_and_its_former_name(flag: str, mode: str):
    found: dict[str, Any] = {}
    command = click.command()(options_of(EngineConfig)(lambda **flags: found.update(flags)))
    result = CliRunner().invoke(command, ["--model", "x", flag, mode])
    assert result.exit_code == 0, result.output
    assert found["engine_core_mode"] == mode
