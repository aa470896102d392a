"""The command line's own refusals, in one line each. tests/e2e covers what the commands do."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from loraplex.cli import main
from loraplex.commands.config_options import Bytes, Module
from loraplex.commands.programs.programs import engine
from testing.ports import free_port


def run(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> Result:
    clean = {name: None for name in os.environ if name.startswith("LORAPLEX_")}
    return CliRunner().invoke(main, arguments, env=clean | (env or {}), **options)


def refused(result: Result, code: int) -> str:
    """Return the one line on stderr."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


def test_version():
    assert run("--version").stdout.startswith("loraplex 0.")


def test_help_takes_no_second():
    """Help imports nothing that takes seconds; the help itself takes about 0.2 s."""
    script = (
        "import sys\n"
        "from loraplex.cli import main\n"
        "try:\n    main(['--help'])\n"
        "finally:\n    print([m for m in ('torch', 'transformers', 'aiohttp', 'sqlalchemy') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Commands:" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("no-such-command",), "no-such-command"),
        (("up", "--no-such-flag"), "--no-such-flag"),
        (("up", "--engines", "0"), "'--engines': expected a whole number from 1 to 64; got 0"),
        (("up", "--engines", "two"), "'--engines': expected a whole number from 1 to 64; got two"),
        (
            ("engine", "--model", "x", "--gpu-memory-utilization", "0"),
            "'--gpu-memory-utilization': expected a number above 0 and at most 1; got 0",
        ),
        (
            ("engine", "--model", "x", "--max-num-seqs", "0"),
            "'--max-num-seqs': expected a whole number of at least 1; got 0",
        ),
        (("up",), "--model"),
        (("up", "--demo", "--port", "99999"), "--port"),
        (("engine",), "--model"),
        (("engine", "--model", "x", "--kv-cache-memory", "lots"), "'lots' is not a size"),
        (("engine", "--model", "x", "--lora-modules", "nameonly"), "'nameonly' is neither name=path nor"),
        (("engine", "--model", "x", "--max-num-seqs", "many"), "--max-num-seqs"),
        (("migrate",), "LORAPLEX_DATABASE_URL"),
        (("tenant", "create"), "NAME"),
        (
            ("tenant", "create", "x", "--tokens-per-day", "many"),
            "'many' is not a whole number like 20000, 20k or 1M, nor 'none'",
        ),
        (("tenant", "create", "x", "--budget-per-month", "ten"), "'ten' is not an amount like 12.50"),
        *(
            (("tenant", "create", "x", "--budget-per-month", amount), f"expected {expected}, got {amount}")
            for amount, expected in (
                ("0.0000001", "at most six decimals"),
                ("-1", "0.00 or more"),
                ("1e10", "at most 1000000000.00"),
            )
        ),
        (("tenant", "create", "x", "--budget-per-month", "nan"), "'nan' is not an amount like 12.50, nor 'none'"),
        (("price", "set", "x", "--input", "none", "--output", "1"), "'none' is not an amount like 12.50"),
        (
            ("price", "set", "acme/pirate", "--input", "100000", "--output", "2"),
            "expected at most 1000.00 per million tokens, got 100000",
        ),
        (("tenant", "create", "x", "--model-limits", "{"), "'{' is not JSON"),
        (("tenant", "create", "x", "--model-limits", '{"m": 1}'), "expected an object of objects, like"),
        (("tenant", "create", "x", "--model-limits", '{"m": {"budget_per_month": "x"}}'), "'x' is not an amount"),
        (("usage", "--by", "adapter"), "'adapter' is none of tenant, model, version, key, end_user, hour, day, month"),
        (("usage", "--csv", "--json", "--gateway", "http://127.0.0.1:9", "--admin-key", "k"), "either --csv or --json"),
        (("key", "create", "x", "--scopes", "inference,admin"), "'admin' is none of inference, adapters, usage"),
        (("tenant", "update", "x", "--gateway", "http://127.0.0.1:9", "--admin-key", "k"), "expected a value"),
        (("key", "create", "--gateway", "http://127.0.0.1:9", "--admin-key", "k"), "expected TENANT, or --admin"),
        (
            ("key", "list", "acme", "--admin", "--gateway", "http://127.0.0.1:9", "--admin-key", "k"),
            "expected TENANT, or --admin",
        ),
        (("key", "create", "x", "--expires", "tomorrow"), "'tomorrow' is neither a time like"),
        (("key", "rotate", "x", "--grace", "1"), "'1' is not a duration like"),
        (("adapter", "aliases", "pirate"), "--tenant"),
        (("bench",), "--models"),
        (("bench", "--models", "a"), "--url"),
        (
            ("bench", "--models", "a", "--url", "127.0.0.1:8000"),
            "--url: expected a URL like http://127.0.0.1:8080, got",
        ),
        (("bench", "--models", "a", "--url", "http://127.0.0.1:9", "--json", "/no/such/x.json"), "no folder /no/such"),
        (("tenant", "list", "--gateway", "localhost", "--admin-key", "k"), "--gateway: expected a URL like"),
        (("bench", "--tenants", "/no/such/file.json"), "/no/such/file.json"),
        (("bench", "--tenants", "/dev/null"), "--tenants: cannot read /dev/null: "),
        (("tenant", "create", "x", "--priority", "11"), "'--priority': expected a whole number from 0 to 9; got 11"),
        (("engine", "--model", "x", "--max-loras", "4"), "is vLLM's: use --adapter-memory"),
        (("engine", "--model", "x", "--enable-lora"), "is vLLM's: leave it out"),
        (("engine", "--model", "x", "--lora-modules", '{"name": "a"}'), "is neither name=path nor"),
        (("engine", "--model", "x", "--lora-modules", "a=/a", "nameonly"), "'nameonly' is neither name=path nor"),
        (("engine", "--model", "x", "--lora-modules", '{"name": "a", "path": "/a", "r": 8}'), "has a field 'r'; known"),
        (("engine", "--model", "x", "--lora-modules", "a=/a", "a=/b"), "'a' is given to /a and to /b"),
        (("engine", "--model", "x", "stray"), "unexpected extra argument (stray)"),
        pytest.param(("engine", "--model", "x", "--api-key", ""), "--api-key is empty", marks=pytest.mark.integration),
    ],
)
def test_a_wrong_command_line_is_one_line_and_2(arguments, says):
    assert says in refused(run(*arguments), 2)


@pytest.mark.usefixtures("starts_servers")
@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        (("engine", "--model", "/no/such/folder"), {}, "/no/such/folder"),
        (("engine", "--model", "x", "--internal-token-file", "/no/token"), {}, "Error: --internal-token-file: "),
        (("engine", "--model", "x", "--lora-modules", "a=/no/dir"), {}, "--lora-modules: no such folder: /no/dir"),
        (("engine", "--model", "x/none.gguf"), {}, "no such file: x/none.gguf"),
        (("engine", "--model", "x/none.gguf", "--core", "thread"), {}, "no such file: x/none.gguf"),
        *(
            (("engine", "--model", "x", flag, "/no/such/file"), {}, "--usage-log: no such folder: /no/such")
            for flag in ("--usage-log", "--finished-file")
        ),
        (("engine", "--model", "x", "--adapter-store", "/no/such/store"), {}, "--adapter-store: no such folder: /no"),
        (
            ("bench", "--url", "http://127.0.0.1:9", "--models", "a"),
            {},
            "Error: cannot reach http://127.0.0.1:9: Connection refused",
        ),
        (
            ("tenant", "list", "--gateway", "http://127.0.0.1:9", "--admin-key", "k"),
            {},
            "Error: cannot reach the gateway at http://127.0.0.1:9: Connection refused",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line_and_1(arguments, env, says):
    assert says in refused(run(*arguments, env=env), 1)


def test_all_wrong_settings_are_reported_at_once_with_2():
    """Unset, malformed and misspelt settings are reported together, so that an operator corrects them all at once."""
    env = {"DATABASE_URL": "mysql://me:secret@x", "QUEUE_LENGTH": "0", "REDIS_ULR": "redis://x", "WORKERS": "2"}
    done = run("gateway", env={f"LORAPLEX_{name}": value for name, value in env.items()})
    assert (done.exit_code, done.stdout) == (2, "")
    named = [re.fullmatch(r"Error: LORAPLEX_(\w+): (.*)", line) for line in done.stderr.splitlines()]
    errors = {line[1]: line[2] for line in named if line}
    assert len(errors) == len(named)
    required = {"REDIS_URL", "ENGINES", "INTERNAL_TOKEN", "ADAPTER_STORE", "KEY_PEPPER"}
    assert errors.keys() == required | env.keys() - {"WORKERS"} | {"METRICS_PORT"}
    for name in required:
        assert errors[name].startswith("is required; expected "), errors[name]
    assert errors["DATABASE_URL"] == "expected a URL that starts with sqlite:// or postgresql://"
    assert errors["QUEUE_LENGTH"] == "expected a whole number above 0; got '0'"
    assert errors["REDIS_ULR"] == "unknown setting; did you mean LORAPLEX_REDIS_URL?"


@pytest.mark.parametrize("env", [{}, {"LORAPLEX_DATABASE_URL": "mysql://x"}])
def test_a_migration_without_a_database_is_one_line_and_2(env):
    assert "LORAPLEX_DATABASE_URL: " in refused(run("migrate", env=env), 2)


@pytest.mark.usefixtures("starts_servers")
def test_an_engine_or_a_gateway_on_a_port_in_use_says_so_as_up_does(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    secrets = dict.fromkeys(("INTERNAL_TOKEN", "KEY_PEPPER", "ADMIN_KEY"), "5f0c9a1e7b3d4826c41d07e9")
    others = {"DATABASE_URL": "sqlite:////none", "REDIS_URL": "redis://none", "ENGINES": "http://none"}
    others |= {"ADAPTER_STORE": str(tmp_path), "MODEL_DIR": str(tmp_path), "BASE_MODEL": "m"}
    env = {f"LORAPLEX_{name}": value for name, value in (secrets | others).items()}
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(run("engine", "--model", "/no/such/folder", "--port", str(port)), 1)
        assert refused(run("gateway", "--port", str(port), env=env), 1) == line
    says = f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another with --port"
    assert line == f"Error: {says}"


@pytest.mark.usefixtures("starts_servers")
def test_an_engine_setting_out_of_range_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    for flag, value, expected in (
        ("--block-size", "7", "expected 8, 16, 32, 64 or 128, got 7"),
        ("--device", "simulated:4.5", "expected auto, cpu, cuda or simulated:STEP_MS,MS_PER_TOKEN"),
    ):
        line = refused(run("engine", "--model", str(tmp_path), flag, value), 1)
        assert f"Error: {flag}: {expected}" in line


def test_an_adapter_that_is_not_there_is_named(tmp_path):
    flags = ("--gateway", "http://127.0.0.1:9", "--admin-key", "k", "--tenant", "acme")
    assert f"no such folder or archive: {tmp_path / 'x'}" in refused(
        run("adapter", "push", "x", str(tmp_path / "x"), *flags), 1
    )
    assert "it has no adapter_config.json" in refused(run("adapter", "push", "x", str(tmp_path), *flags), 1)


def test_without_a_gateway_it_says_where_it_looked(tmp_path):
    line = refused(run("tenant", "list", "--data-dir", str(tmp_path)), 2)
    assert "--gateway is not given" in line
    assert str(tmp_path / "local.json") in line
    (tmp_path / "local.json").write_text(json.dumps({"gateway": "http://127.0.0.1:9", "admin_key": "k"}))
    assert "cannot reach the gateway at http://127.0.0.1:9" in refused(
        run("tenant", "list", "--data-dir", str(tmp_path)), 1
    )
    (tmp_path / "local.json").write_text("{")
    assert "local.json" in refused(run("tenant", "list", "--data-dir", str(tmp_path)), 1)


@pytest.fixture
def stranger(starts_servers: None) -> Iterator[tuple[str, list[str]]]:
    """Start a server that is no gateway; yield its URL and the Authorization header of each request it received."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            body = json.dumps({"data": [{"id": "tiny"}, {"id": "mine", "parent": "tiny"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            seen.append(self.headers["Authorization"])
            self.rfile.read(int(self.headers["Content-Length"]))
            body = b'data: {"choices": [{"delta": {"content": "Hi."}}]}\n\ndata: [DONE]\n\n'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing on stderr, which the tests read."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()
        thread.join()


def stored(folder: Path, gateway: str, *files: str) -> tuple[str, str]:
    """Write the files that `loraplex up --demo` leaves for that gateway, or only some of them; return --data-dir."""
    base = {"gateway": gateway, "admin_key": "the admin's", "base_model": "tiny"}
    tenants = [{"name": name, "api_key": f"{name}'s", "models": []} for name in ("acme", "globex")]
    for file in files or ("local.json", "demo.json"):
        (folder / file).write_text(json.dumps(base | ({"tenants": tenants} if file == "demo.json" else {})))
    return "--data-dir", str(folder)


@pytest.mark.parametrize("arguments", [("tenant", "list"), ("usage", "--tenant", "acme"), ("chat", "Hi")])
@pytest.mark.parametrize("by", ["flag", "environment"])
def test_stored_keys_go_to_no_other_gateway(arguments, by, tmp_path, stranger):
    url, seen = stranger
    data = stored(tmp_path, "http://127.0.0.1:9")
    given, env = (("--gateway", url), {}) if by == "flag" else ((), {"LORAPLEX_GATEWAY": url})
    line = refused(run(*arguments, *given, *data, env=env), 2)
    assert f"-key is not given, and {tmp_path}" in line
    assert f"belongs to http://127.0.0.1:9, not to {url}" in line
    assert seen == []


def test_a_key_that_is_given_goes_to_the_gateway_that_is_given(tmp_path, stranger):
    url, seen = stranger
    done = run("chat", "Hi", "--gateway", url, "--api-key", "mine", *stored(tmp_path, "http://127.0.0.1:9"))
    assert done.stdout == "Hi.\n"
    assert seen == ["Bearer mine"] * 2  # the base model's name is requested, not read from a file


@pytest.mark.parametrize("written", ["{}", "{}/"])
def test_the_stored_gateway_gets_the_stored_key(written, tmp_path, stranger):
    url, seen = stranger
    assert run("tenant", "list", "--json", "--gateway", written.format(url), *stored(tmp_path, url)).exit_code == 0
    assert seen == ["Bearer the admin's"]


def test_bench_sends_a_files_keys_to_its_own_gateway_only(tmp_path, stranger):
    url, seen = stranger
    stored(tmp_path, "http://127.0.0.1:9")
    demo = json.loads((tmp_path / "demo.json").read_text())
    demo["tenants"][0]["models"] = ["mine"]
    (tmp_path / "demo.json").write_text(json.dumps(demo))
    flags = (
        "--tenants",
        str(tmp_path / "demo.json"),
        "--n",
        "1",
        "--warmup",
        "0",
        "--output-tokens",
        "1",
        "--no-overhead",
    )
    line = refused(run("bench", *flags, "--url", url), 2)
    assert f"belongs to http://127.0.0.1:9, not to {url}; with --keys-to-other-url" in line
    assert seen == []
    run("bench", *flags, "--url", url, "--keys-to-other-url")
    assert "Bearer acme's" in seen


def test_chat_finds_the_gateway_in_local_json(tmp_path, stranger):
    url, seen = stranger
    data = stored(tmp_path, url, "local.json")
    assert run("chat", "Hi", *data, env={"LORAPLEX_API_KEY": "solo's"}).stdout == "Hi.\n"
    assert set(seen) == {"Bearer solo's"}
    assert "--api-key is not given" in refused(run("chat", "Hi", *data), 2)


def test_chat_asks_the_demos_tenants_who_has_the_model(tmp_path, stranger):
    url, seen = stranger
    data = stored(tmp_path, url)
    assert run("chat", "Hi", "--model", "mine", *data).stdout == "Hi.\n"
    assert seen == ["Bearer acme's"] * 2
    for part in ("mine@2", "mine:prod", "mine:prod*0.7+mine@1*0.3"):
        assert run("chat", "Hi", "--model", part, *data).stdout == "Hi.\n"
    seen.clear()
    for unknown in ("nobodys", "nobodys@2", "mine*0.7+nobodys*0.3", "mine*x"):
        line = refused(run("chat", "Hi", "--model", unknown, *data), 2)
        assert line == f"Error: no tenant in demo.json has a model {unknown!r}; pass --api-key"
    assert seen == ["Bearer acme's", "Bearer globex's"] * 4


@pytest.mark.usefixtures("starts_servers")
def test_up_with_a_redis_that_is_not_there_starts_nothing(tmp_path):
    flags = ("--port", str(free_port()), "--data-dir", str(tmp_path / "data"), "--redis-url", "redis://127.0.0.1:9")
    assert "--redis-url" in refused(run("up", "--demo", *flags), 1)
    assert not (tmp_path / "data").exists()


def test_migrate_makes_the_schema_and_may_be_repeated(tmp_path):
    env = {"LORAPLEX_DATABASE_URL": f"sqlite:///{tmp_path / 'records.db'}"}
    for _ in range(2):
        assert run("migrate", env=env).stdout == "the database is up to date\n"
    assert (tmp_path / "records.db").stat().st_size > 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("2k", 2048), ("3MiB", 3 * 2**20), ("1.5GiB", 3 * 2**29), ("2gb", 2**31), ("1T", 2**40)],
)
def test_sizes(text, size):
    assert Bytes().convert(text, None, None) == size


def test_modules():
    name, path = Module().convert("sql=/adapters/a=b", None, None)
    assert (name, str(path)) == ("sql", "/adapters/a=b")
    assert Module().convert("sql=~/a", None, None)[1] == Path.home() / "a"
    assert Module().convert('{"name": "sql", "path": "/a"}', None, None) == ("sql", Path("/a"))
    of_vllm = '{"name": "sql", "path": "/a", "base_model_name": "llama"}'
    assert Module().convert(of_vllm, None, None) == ("sql", Path("/a"))


@pytest.mark.parametrize(
    "words",
    [
        ["--lora-modules", "a=/a", "--lora-modules", "b=/b", "--port", "1"],
        ["--lora-modules", "a=/a", "b=/b", "--port", "1"],
        ["--port", "1", "--lora-modules=a=/a", '{"name": "b", "path": "/b"}'],
        ["--lora-modules", "a=/a", "--port", "1", "--lora-modules", "b=/b"],
    ],
)
def test_several_modules_may_follow_one_flag_as_vllm_has_it(words):
    params = engine.make_context("engine", ["--model", "x", *words]).params
    assert params["lora_modules"] == (("a", Path("/a")), ("b", Path("/b")))
    assert params["port"] == 1
