"""Fields of a frozen configuration that are also flags of a command: default, bounds and help text in one place.

Independent of the command line: `loraplex.commands.config_options` makes the flags.
"""

from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from wire.errors import ConfigError


@dataclass(frozen=True)
class Times:
    """A multiple of another option's value."""

    factor: int
    option: str

    def __str__(self) -> str:
        return f"{self.factor} times --{self.option.replace('_', '-')}"


@dataclass(frozen=True)
class ByDevice:
    """Default on the CPU and on a GPU, of an option that is None unless it is given. None: the option has no effect
    there unless it is given.
    """

    cpu: float | Times | None
    gpu: float | Times | None


@dataclass(frozen=True)
class Option:
    """Flag of a configuration's field.

    flag: its name, if it is not the field's. former: the name in earlier releases, which is accepted too. by_device:
    default that depends on the device. least, most: inclusive bounds of a number. above: exclusive lower bound.
    is_size: whether it is a number of bytes, which the command line also accepts as `4GiB`. env: the environment
    variable that replaces the flag.
    """

    help: str
    flag: str | None = None
    former: str | None = None
    by_device: ByDevice | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    is_size: bool = False
    env: str | None = None


def option(default: Any = MISSING, *, help: str, **settings: Any) -> Any:
    """Return a dataclass field that is also a flag. settings: those of `Option`."""
    return field(default=default, metadata={"option": Option(help, **settings)})


def options(config: type) -> dict[str, Option]:
    """Return the flags of a configuration by field name."""
    return {f.name: f.metadata["option"] for f in fields(config) if "option" in f.metadata}


def value_types(config: type) -> dict[str, Any]:
    """Return the type of each field's values, without None."""
    return {name: _without_none(hint) for name, hint in get_type_hints(config).items()}


def check_options(config: Any) -> None:
    """Check a configuration's values against their choices and bounds. Raises ConfigError that names the field."""
    types = value_types(type(config))
    for name, limits in options(type(config)).items():
        value, kind = getattr(config, name), types[name]
        if value is None:
            continue
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ConfigError(name, f"expected one of {', '.join(get_args(kind))}, got {value!r}")
        if limits.least is not None and value < limits.least:
            raise ConfigError(name, f"expected at least {limits.least:g}, got {value}")
        if limits.above is not None and value <= limits.above:
            raise ConfigError(name, f"expected more than {limits.above:g}, got {value}")
        if limits.most is not None and value > limits.most:
            raise ConfigError(name, f"expected at most {limits.most:g}, got {value}")


def _without_none(hint: Any) -> Any:
    if get_origin(hint) not in (Union, UnionType):
        return hint
    [kind] = [kind for kind in get_args(hint) if kind is not NoneType]
    return kind
