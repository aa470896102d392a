"""The gateway in which the demo's tenants are made."""

from tests.gateway.conftest import gateway, migrated, model_dir, redis_url, upstream  # noqa: F401  (fixtures)
