"""Schemes of database URLs, with the driver that serves each."""

DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
EXPECTED = "a URL that starts with sqlite:// or postgresql://"
