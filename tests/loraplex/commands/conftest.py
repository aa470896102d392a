"""The gateway before which the commands run, as in the gateway's tests."""

from tests.gateway.conftest import (  # noqa: F401  (fixtures)
    _check_servers_end,
    _constants_made_once,
    _kept_check_server,
    _shared_statements,
    database,
    gateway,
    migrated,
    migrated_postgres_url,
    migrated_template,
    migrated_url,
    model_dir,
    postgres,
    postgres_url,
    redis_url,
    serve,
    shared_folder,
    shared_gateway,
    shared_upstream,
    upstream,
)
