"""The `loraplex` command line.

Each command imports its dependencies when it runs, so that `--help` is quick and the gateway never loads torch.
"""

import sys
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

from loraplex.commands import bench, chat
from loraplex.commands.access import keys, sessions, whoami
from loraplex.commands.adapters import adapters
from loraplex.commands.fleet import bases, engines, fleet, live, quarantine
from loraplex.commands.programs import backups, demo, programs, size, up
from loraplex.commands.reports import alerts, audit, overview, refusals, requests
from loraplex.commands.tenants import apply, bulk, plans, tenants
from loraplex.commands.usage import prices, usage
from wire.garbage import collect_seldom


class OneLineErrors(click.Group):
    """Command group that reports a user's mistake in one line on stderr, without click's usage text."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run as a program, with few garbage collections. Tests call `main`, so they keep their thresholds."""
        collect_seldom()
        return super().__call__(*args, **kwargs)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = super().main(*args, **kwargs | {"standalone_mode": False})
        except NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            click.echo(f"Error: {error.format_message()}", err=True)
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo("Interrupted", err=True)
            sys.exit(130)
        sys.exit(result if isinstance(result, int) else 0)


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="loraplex", message="loraplex %(version)s")
def main() -> None:
    """Multi-tenant serving of base models with many LoRA adapters each."""


programs.engine.subcommands = engines.engines
for command in (
    *(up.up, programs.gateway, programs.engine, programs.migrate, size.size, backups.backup, backups.restore),
    *(
        tenants.tenant,
        plans.plan,
        keys.key,
        adapters.adapter,
        whoami.whoami,
        live.status,
        live.top,
        overview.attention,
        overview.activity,
        overview.search,
        overview.settings,
        fleet.residency,
        fleet.fairness,
        quarantine.quarantine,
        usage.usage,
        prices.price,
        audit.audit,
        alerts.webhook,
        alerts.events,
        requests.requests,
        refusals.refusals,
        sessions.session,
        bases.base,
        chat.chat,
        bench.bench,
        demo.demo,
    ),
):
    main.add_command(command)
for command in (apply.apply, bulk.bulk):
    tenants.tenant.add_command(command)

if __name__ == "__main__":
    main(prog_name="loraplex")
