"""Alembic's entry point. `gateway.records.sql.database` passes the connection, and handles URLs and locking."""

from alembic import context

from gateway.records.events.tables import events

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("run `loraplex migrate`: these migrations run on a connection of gateway.records.sql.database")
# Batch mode: SQLite alters a table by copying it.
context.configure(connection=connection, target_metadata=events.metadata, render_as_batch=True)
context.run_migrations()
