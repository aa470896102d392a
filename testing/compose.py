"""docker-compose.yml as the programs see it: variables expanded, volumes and durations parsed."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docker-compose.yml"
UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}


def expand(text: str, given: Mapping[str, str]) -> str:
    """Expand Compose's `${NAME}`, `${NAME:-default}` and `${NAME:?message}`. Raises KeyError if the last is unset."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        return given.get(name) or (given[name] if operator == ":?" else rest or "")

    return re.sub(r"\$\{(\w+)(?:(:-|:\?)([^}]*))?\}", value, text)


@dataclass(frozen=True)
class Mount:
    """A volume in a container. source: a volume's name or a host's path, None for an unnamed volume."""

    source: str | None
    target: str
    is_read_only: bool


@dataclass(frozen=True)
class Service:
    """A service. needs: condition by service that it waits for. memory: limit in bytes, None without one."""

    name: str
    image: str | None
    target: str | None
    command: list[str]
    environment: dict[str, str]
    mounts: list[Mount]
    needs: dict[str, str]
    probe: list[str] | None
    memory: int | None
    grace_s: int
    profiles: list[str] = field(default_factory=list)
    tmpfs: list[str] = field(default_factory=list)


def read_services(given: Mapping[str, str], profiles: tuple[str, ...] = (), file: Path = FILE) -> dict[str, Service]:
    """Return the services that `docker compose up` starts with these profiles, each after those that it waits for."""
    content = yaml.safe_load(file.read_text())
    found = {name: _service(name, _expanded(spec, given)) for name, spec in content["services"].items()}
    chosen = {name: each for name, each in found.items() if not each.profiles or set(each.profiles) & set(profiles)}
    return {name: chosen[name] for name in _in_order(chosen)}


def _expanded(value: Any, given: Mapping[str, str]) -> Any:
    """Expand the variables in each text of a parsed value."""
    match value:
        case str():
            return expand(value, given)
        case list():
            return [_expanded(each, given) for each in value]
        case dict():
            return {key: _expanded(each, given) for key, each in value.items()}
    return value


def _in_order(services: Mapping[str, Service]) -> Iterator[str]:
    waiting = dict(services)
    while waiting:
        ready = [name for name, service in waiting.items() if not service.needs.keys() & waiting.keys()]
        if not ready:
            raise ValueError(f"services wait for each other: {', '.join(waiting)}")
        for name in ready:
            del waiting[name]
            yield name


def _service(name: str, spec: dict[str, Any]) -> Service:
    probe = spec.get("healthcheck", {}).get("test")
    return Service(
        name=name,
        image=spec.get("image"),
        target=spec.get("build", {}).get("target"),
        command=spec.get("command", []),
        environment={key: str(value) for key, value in spec.get("environment", {}).items()},
        mounts=[_mount(text) for text in spec.get("volumes", [])],
        needs={other: how["condition"] for other, how in spec.get("depends_on", {}).items()},
        probe=probe[1:] if probe else None,
        memory=_bytes(spec["mem_limit"]) if "mem_limit" in spec else None,
        grace_s=int(spec.get("stop_grace_period", "10s").removesuffix("s")),
        profiles=spec.get("profiles", []),
        tmpfs=spec.get("tmpfs", []),
    )


def _mount(text: str) -> Mount:
    parts = text.split(":")
    is_read_only = parts[-1] == "ro"
    if is_read_only:
        parts.pop()
    return Mount(parts[0] if len(parts) == 2 else None, parts[-1], is_read_only)


def _bytes(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]]
