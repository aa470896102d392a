"""Shared parts of the commands: error output, and the gateway's URL and key."""

import asyncio
import shlex
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from loraplex.up.datadir import DATA_DIR, DataDirError, read_json
from wire.environment import read_variable
from wire.errors import ConfigError

if TYPE_CHECKING:
    from loraplex.client import GatewayClient

T = TypeVar("T")


@contextmanager
def one_line(*errors: type[Exception]) -> Iterator[None]:
    """Turn domain errors into a message on stderr and exit code 1. Any other error is a bug and keeps its traceback.

    The message of a ConfigError names the flag.
    """
    try:
        yield
    except ConfigError as error:
        if ConfigError not in errors:
            raise
        raise click.ClickException(f"{_flag(error.field)}: {error.message}") from error
    except errors as error:
        raise click.ClickException(str(error)) from error


def _flag(field: str) -> str:
    """Return the current command's flag for a field of its configuration, or the field's name if it has no flag."""
    params = click.get_current_context().command.params
    return next((param.opts[0] for param in params if param.name == field), field)


def again(command: str) -> str:
    """Return a command for the user to run, with the `--gateway` and `--data-dir` of the current command line."""
    context = click.get_current_context()
    for name in ("gateway", "data_dir"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            command += f" --{name.replace('_', '-')} {shlex.quote(str(context.params[name]))}"
    return command


class WrongSettings(click.UsageError):
    """Usage error with one line for each wrong setting of the gateway."""

    def format_message(self) -> str:
        return "\nError: ".join(self.message.splitlines())


@contextmanager
def settings_errors() -> Iterator[None]:
    """Report all wrong settings with exit code 2, and settings that cannot be used now (a port in use) with 1."""
    from gateway.settings import NotUsableNow, SettingsError

    try:
        yield
    except NotUsableNow as error:
        raise click.ClickException(str(error)) from error
    except SettingsError as error:
        raise WrongSettings(str(error)) from error


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result. SIGTERM cancels it, as Ctrl-C does; the command then exits with 143.

    An exception raised by a signal handler could come up anywhere, also inside a database driver, and crash it.
    """
    is_terminated = False

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None

        def end() -> None:
            nonlocal is_terminated
            # A second signal must not end the cleaning up after the first.
            if not is_terminated:
                is_terminated = True
                task.cancel()

        # Only the main thread may set handlers.
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
        return await work

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        if not is_terminated:
            raise
        click.echo("Terminated", err=True)
        sys.exit(128 + signal.SIGTERM)


def variable(name: str) -> str | None:
    """Return a variable's value, its own or its file's. Raises click.UsageError for a file that cannot be used."""
    try:
        return read_variable(name)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def database_url() -> str:
    """Return LORAPLEX_DATABASE_URL. Raises click.UsageError without it."""
    url = variable("LORAPLEX_DATABASE_URL")
    if not url:
        raise click.UsageError("LORAPLEX_DATABASE_URL: is required; expected the URL of the database")
    return url


def examples(*lines: str) -> str:
    """Return a command's epilog: example command lines to copy, which are not wrapped."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


@dataclass(frozen=True)
class Gateway:
    """The gateway's URL and the key to use.

    as_tenant: the key is a tenant's own, not an operator's. stored_in: the local.json that names the URL; None if the
    user has given it.
    """

    url: str
    key: str
    as_tenant: bool = False
    stored_in: Path | None = None

    def run(self, work: "Callable[[GatewayClient], Awaitable[T]]") -> T:
        from loraplex.client import GatewayClient, GatewayError, GatewayUnreachable

        async def connected() -> T:
            async with GatewayClient(self.url, self.key) as client:
                try:
                    return await work(client)
                except GatewayUnreachable as error:
                    if self.stored_in is None:
                        raise
                    hint = f"{self.stored_in} names it: is its `loraplex up` running? --data-dir selects another one"
                    raise GatewayUnreachable(f"{error} ({hint})") from error

        with one_line(GatewayError, OSError):
            return run(connected())


def find_gateway(url: str | None, key: str | None, data_dir: Path, key_flag: str = "--admin-key") -> Gateway:
    """Return the gateway and the key given by flags or the environment, else those of `loraplex up`.

    local.json's key is sent only to local.json's gateway. Raises click.UsageError naming what is missing.
    """
    path = data_dir / "local.json"
    with one_line(DataDirError):
        local = (read_json(path) or {}) if url is None or key is None else {}
    url = url or local.get("gateway")
    if not url:
        raise no_gateway(path)
    check_url(url, "--gateway")
    if not key and is_gateway_of(local, url):
        key = local["admin_key"]
    if not key:
        raise click.UsageError(f"{key_flag} is not given, and {path} {whose(local, url)}")
    return Gateway(url, key, stored_in=path if local.get("gateway") == url else None)


def no_gateway(path: Path) -> click.UsageError:
    """Return the error of a command that knows no gateway. path: the local.json that does not exist."""
    return click.UsageError(
        f"--gateway is not given, and {path} does not exist: start `loraplex up`, or give the --data-dir of one that "
        "runs, or --gateway"
    )


def check_url(url: str, flag: str) -> None:
    """Raise click.UsageError for a text that is not a server's URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.UsageError(f"{flag}: expected a URL like http://127.0.0.1:8080, got {url!r}")


def is_gateway_of(stored: dict[str, Any], url: str) -> bool:
    """Return whether a file of the data directory belongs to this gateway; its keys are sent to no other gateway."""
    return stored.get("gateway", "").rstrip("/") == url.rstrip("/")


def whose(stored: dict[str, Any], url: str) -> str:
    """Return the end of an error sentence that explains why a file's keys are not used for `url`."""
    return f"belongs to {stored['gateway']}, not to {url}" if stored else "does not exist"


def _where_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--data-dir",
            type=click.Path(path_type=Path),
            default=DATA_DIR,
            show_default=True,
            help="Data directory of `loraplex up`; its local.json is read if the two options above are not given.",
        ),
        click.option("--admin-key", envvar="LORAPLEX_ADMIN_KEY", help="An operator's key. [env: LORAPLEX_ADMIN_KEY]"),
        click.option("--gateway", envvar="LORAPLEX_GATEWAY", help="The gateway's URL. [env: LORAPLEX_GATEWAY]"),
    ):
        command = option(command)
    return command


download_dir_option = click.option(
    "--download-dir",
    type=click.Path(path_type=Path),
    default=DATA_DIR / "models",
    show_default=True,
    help="Folder for models downloaded by hub id.",
)
yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")


def confirm(question: str, *, is_given: bool) -> None:
    """Ask before a deletion. is_given: whether --yes was given. Raises click.UsageError, click.ClickException."""
    if is_given:
        return
    if not sys.stdin.isatty():
        raise click.UsageError("nothing was deleted: without a terminal, --yes is required")
    if not click.confirm(question, err=True):
        raise click.ClickException("nothing was deleted")


class WithSubcommands(click.Command):
    """A command whose first word may instead name a command of `subcommands`, a group."""

    subcommands: click.Group

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in self.subcommands.commands:
            return self.subcommands.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


def admin_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of an operator's command, which receives `gateway`."""

    @_where_options
    @wraps(command)
    def found(gateway: str | None, admin_key: str | None, data_dir: Path, **options: Any) -> None:
        command(gateway=find_gateway(gateway, admin_key, data_dir), **options)

    return found


def own_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of an operator's command that a tenant may use for itself, with --api-key.

    The command receives `gateway`; `gateway.as_tenant` is true unless TENANT, --admin or an operator's key is given.
    """

    @click.option(
        "--api-key",
        envvar="LORAPLEX_API_KEY",
        help="A key of the tenant with the scope keys, instead of an operator's. [env: LORAPLEX_API_KEY]",
    )
    @_where_options
    @wraps(command)
    def found(gateway: str | None, api_key: str | None, admin_key: str | None, data_dir: Path, **options: Any) -> None:
        is_operator = admin_key is not None or options.get("tenant") is not None or options.get("admin", False)
        if api_key is not None and not is_operator:
            where = replace(find_gateway(gateway, api_key, data_dir, "--api-key"), as_tenant=True)
        else:
            where = find_gateway(gateway, admin_key, data_dir)
        command(gateway=where, **options)

    return found


def tenant_options(*, or_all: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of a command that tenants may also use.

    The command receives `gateway` and `tenant`; `tenant` is None with a tenant's own key. or_all: without --tenant and
    --api-key, `tenant` is None and the key an operator's: the command covers all tenants.
    """
    whose = "default, with an operator's key: all tenants." if or_all else "needs an operator's key."

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        @click.option("--tenant", help=f"Tenant to act on; {whose}")
        @click.option(
            "--api-key",
            envvar="LORAPLEX_API_KEY",
            help="The tenant's own key, instead of --tenant. [env: LORAPLEX_API_KEY]",
        )
        @_where_options
        @wraps(command)
        def found(
            tenant: str | None,
            api_key: str | None,
            gateway: str | None,
            admin_key: str | None,
            data_dir: Path,
            **options: Any,
        ) -> None:
            if tenant is None and api_key is None and not or_all:
                raise click.UsageError("expected --tenant NAME (as an operator) or --api-key KEY (as the tenant)")
            if tenant is None and api_key is not None:
                where = replace(find_gateway(gateway, api_key, data_dir, "--api-key"), as_tenant=True)
            else:
                where = find_gateway(gateway, admin_key, data_dir)
            command(tenant=tenant, gateway=where, **options)

        return found

    return with_options
