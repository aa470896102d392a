"""The URL of a wrong adapter store: one line of every program, which names the flag or the setting."""

from pathlib import Path

import pytest

from testing.ports import free_port
from testing.tiny import save_model
from tests.loraplex.test_cli import refused, run

SAYS = "expected a directory, a file:// URL or s3://bucket/prefix, got scheme 'ftp'"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the settings of a gateway with a wrong store."""
    settings = dict.fromkeys(("INTERNAL_TOKEN", "KEY_PEPPER", "ADMIN_KEY"), "5f0c9a1e7b3d4826c41d07e9")
    settings |= {"DATABASE_URL": f"sqlite:///{tmp_path}/x.db", "REDIS_URL": "redis://none", "ENGINES": "http://none"}
    return {f"LORAPLEX_{name}": value for name, value in (settings | {"ADAPTER_STORE": "ftp://host/x"}).items()}


@pytest.mark.usefixtures("starts_servers")
def test_an_engine_names_its_flag(tmp_path: Path):
    save_model(tmp_path / "tiny", 64)
    port = ("--port", str(free_port()))
    arguments = ("engine", "--model", str(tmp_path / "tiny"), "--adapter-store", "ftp://host/x")
    assert refused(run(*arguments, *port), 1) == f"Error: --adapter-store: {SAYS}"


def test_a_gateway_names_its_setting(environment: dict[str, str]):
    line = refused(run("gateway", "--port", str(free_port()), env=environment), 2)
    assert line == f"Error: LORAPLEX_ADAPTER_STORE: {SAYS}"


def test_a_backup_names_its_flag(environment: dict[str, str], tmp_path: Path):
    assert refused(run("backup", str(tmp_path / "file"), env=environment), 2) == f"Error: --adapter-store: {SAYS}"
