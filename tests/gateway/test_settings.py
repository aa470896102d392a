"""The settings: accepted values, and refusals that name the setting."""

import secrets
from pathlib import Path
from typing import Any

import pytest

from gateway.access.credentials import MIN_BITS, guess_bits
from gateway.settings import RENAMED, Settings, SettingsError
from testing.gateway.running import ADMIN_KEY, PEPPER
from testing.gateway.upstream import TOKEN


@pytest.fixture
def environ(model_dir: Path) -> dict[str, str]:
    return {
        "LORAPLEX_DATABASE_URL": "sqlite:////tmp/x.db",
        "LORAPLEX_REDIS_URL": "redis://:redis-password@127.0.0.1",
        "LORAPLEX_ENGINES": "http://127.0.0.1:1/, http://127.0.0.1:2",
        "LORAPLEX_INTERNAL_TOKEN": TOKEN,
        "LORAPLEX_ADAPTER_STORE": "/nowhere",
        "LORAPLEX_MODEL_DIR": str(model_dir),
        "LORAPLEX_BASE_MODEL": "base",
        "LORAPLEX_KEY_PEPPER": PEPPER,
        "LORAPLEX_ADMIN_KEY": ADMIN_KEY,
    }


def test_the_environment_then_overrides(environ: dict[str, str]):
    environ |= {"LORAPLEX_PORT": "81", "LORAPLEX_MIGRATE_ON_START": "true", "LORAPLEX_REDIS_TIMEOUT": "0.5"}
    settings = Settings.load(environ, port=82, host=None, metrics_port=None)
    assert settings.engines == ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert (settings.port, settings.host, settings.metrics_port) == (82, "127.0.0.1", None)
    assert (settings.migrate_on_start, settings.redis_timeout) == (True, 0.5)


def test_what_other_programs_read_is_not_ours_to_refuse(environ: dict[str, str]):
    Settings.load(environ | {"LORAPLEX_GATEWAY": "http://x", "LORAPLEX_TEST_CACHE": "y", "PORT": "z"})


@pytest.mark.parametrize("form", ["", "_FILE"])
@pytest.mark.parametrize(("former", "now"), RENAMED.items())
def test_a_former_name_is_refused_with_the_name_now(former: str, now: str, form: str, environ: dict[str, str]):
    with pytest.raises(SettingsError, match=f"the setting is now named LORAPLEX_{now}$") as refused:
        Settings.load(environ | {f"LORAPLEX_{former}{form}": "5"})
    assert refused.value.field == f"LORAPLEX_{former}{form}"
    assert now.lower() in Settings.__dataclass_fields__


@pytest.mark.parametrize(("former", "now"), RENAMED.items())
def test_gateways_of_two_releases_share_an_environment(former: str, now: str, environ: dict[str, str]):
    settings = Settings.load(environ | {f"LORAPLEX_{former}": "7", f"LORAPLEX_{now}": "9"})
    assert getattr(settings, now.lower()) == 9
    # An empty variable is an unset one.
    Settings.load(environ | {f"LORAPLEX_{former}": ""})


def test_secrets_are_not_shown(environ: dict[str, str]):
    shown = repr(Settings.load(environ))
    for secret in (TOKEN, PEPPER, ADMIN_KEY, "redis-password"):
        assert secret not in shown


@pytest.mark.parametrize("missing", ["DATABASE_URL", "ENGINES", "KEY_PEPPER"])
def test_what_is_missing_is_named(missing: str, environ: dict[str, str]):
    del environ[f"LORAPLEX_{missing}"]
    with pytest.raises(SettingsError) as refused:
        Settings.load(environ)
    assert refused.value.field == f"LORAPLEX_{missing}"


def test_the_short_form_for_one_base_model_is_both_settings_or_none(environ: dict[str, str]):
    del environ["LORAPLEX_MODEL_DIR"]
    with pytest.raises(SettingsError, match="expected together with LORAPLEX_MODEL_DIR") as refused:
        Settings.load(environ)
    assert refused.value.field == "LORAPLEX_BASE_MODEL"
    del environ["LORAPLEX_BASE_MODEL"]
    assert Settings.load(environ).base_model is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "eighty"),
        ("PORT", "70000"),
        ("METRICS_PORT", "-1"),
        ("ENGINES", "127.0.0.1:1"),
        ("ENGINES", ","),
        ("DATABASE_URL", "mysql://x"),
        ("REDIS_URL", "http://x"),
        ("KEY_PEPPER", "short"),
        ("KEY_PEPPER", "p" * 32),
        ("INTERNAL_TOKEN", "0123456789abcdef0123456789abcdef"),
        ("ANNOUNCE_TOKEN", "my-announce-token-for-engines"),
        ("ADMIN_KEY", "short"),
        ("ADMIN_KEY", "changeme-changeme"),
        ("ADMIN_KEY", "loraplex-admin-secret-key"),
        ("MODEL_DIR", "/no/such/folder"),
        ("REDIS_TIMEOUT", "0"),
        ("ENGINE_HEARTBEAT_TIMEOUT", "0"),
        ("SHUTDOWN_DELAY", "-1"),
        ("DATABASE_WAIT", "nan"),
        ("MAX_MODEL_LEN", "-5"),
        ("MIGRATE_ON_START", "perhaps"),
        ("IMPORT_SOURCES", "ftp://host/folder"),
        *(
            ("CORS_ORIGINS", origin)
            for origin in ("*", "null", "https://a.example/x", "https://*.a.example", "a.example")
        ),
        ("TRACE_URL", "https://traces.example"),
        ("TRACE_URL", "javascript:alert('{request_id}')"),
        ("TRACE_URL", "https://{request_id}.example/"),
        ("TRACE_URL", "https://traces.example/{request_id}?from={from}"),
        ("TRACE_URL", "https://traces.example/{request_id} x"),
        ("CURRENCY", "euro"),
        ("ENVIRONMENT", "e" * 33),
        ("ENVIRONMENT", "pro\u202educt"),
        ("ENVIRONMENT", " production"),
        ("LOG_FORMAT", "xml"),
        ("IMPORT_SOURCES", "file:///adapters#1"),
        ("REDIS_ULR", "redis://x"),
        ("ENGINE", "http://x"),
    ],
)
def test_what_is_wrong_is_named(name: str, value: str, environ: dict[str, str]):
    with pytest.raises(SettingsError) as refused:
        Settings.load(environ | {f"LORAPLEX_{name}": value})
    assert refused.value.field == f"LORAPLEX_{name}"


def test_all_that_is_wrong_is_named_together(environ: dict[str, str]):
    del environ["LORAPLEX_BASE_MODEL"]
    wrong = {"LORAPLEX_PORT": "eighty", "LORAPLEX_KEY_PEPPER": "short", "LORAPLEX_MAX_BODY_BYTES": "20000000"}
    with pytest.raises(SettingsError) as refused:
        Settings.load(environ | wrong)
    lines = str(refused.value).splitlines()
    assert sorted(line.split(":")[0] for line in lines) == sorted(
        ["LORAPLEX_BASE_MODEL", "LORAPLEX_PORT", "LORAPLEX_KEY_PEPPER", "LORAPLEX_BODY_MEMORY_BYTES"]
    )
    assert "LORAPLEX_PORT: expected a port between 0 and 65535; got 'eighty'" in lines
    assert "LORAPLEX_BODY_MEMORY_BYTES: expected at least four times LORAPLEX_MAX_BODY_BYTES" in lines


def test_a_condition_on_several_settings_waits_until_each_is_right(environ: dict[str, str]):
    with pytest.raises(SettingsError) as refused:
        Settings.load(environ | {"LORAPLEX_MAX_BODY_BYTES": "x", "LORAPLEX_BODY_MEMORY_BYTES": "1"})
    assert str(refused.value) == "LORAPLEX_MAX_BODY_BYTES: expected a number of bytes above 0; got 'x'"


def test_an_unknown_override_is_refused_and_the_known_are_listed(environ: dict[str, Any]):
    with pytest.raises(SettingsError, match=r"prot.*known are.*port"):
        Settings.load(environ, prot=1)


def test_a_guessable_secret_is_refused_without_being_repeated(environ: dict[str, str]):
    with pytest.raises(SettingsError, match="openssl rand") as refused:
        Settings.load(environ | {"LORAPLEX_ADMIN_KEY": "changeme-changeme"})
    assert "changeme" not in str(refused.value)


@pytest.mark.parametrize(
    "secret",
    [
        "a" * 64,
        "ab" * 32,
        "aaaabbbbccccdddd",
        "0123456789" * 4,
        "abcdefghijklmnopqrstuvwxyz",
        "password-password-password",
        "my-loraplex-admin-secret-key",
        "correct-horse-battery-staple",
        "Summer2026!Summer2026!",
        "20260101202601012026",
    ],
)
def test_secrets_that_can_be_guessed(secret: str):
    assert guess_bits(secret) < MIN_BITS


@pytest.mark.parametrize("made", [lambda: secrets.token_urlsafe(32), lambda: secrets.token_hex(16)])
def test_what_generators_print_is_accepted(made: Any):
    """Common generators' output is accepted. `loraplex up` made the first kind, and its old folders must start."""
    assert min(guess_bits(made()) for _ in range(2000)) >= MIN_BITS
