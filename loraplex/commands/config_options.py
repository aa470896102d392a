"""Flags of a command, made from the fields of a frozen configuration (`wire.options`)."""

import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click

from engine.speculative_config import SpeculativeConfig
from loraplex.commands.values import Number, bounds_words
from wire.errors import ConfigError
from wire.options import ByDevice, Option, options, value_types

C = TypeVar("C", bound=Callable[..., Any])

MODULE_FIELDS = ("name", "path", "base_model_name")
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class Bytes(click.ParamType):
    """Size in bytes: `2147483648`, `2048MiB`, `2G` (units are powers of 1024)."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = value.strip().lower().removesuffix("b").removesuffix("i")
        number, unit = text.rstrip("kmgt"), text[len(text.rstrip("kmgt")) :]
        try:
            return int(float(number) * UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            self.fail(f"{value!r} is not a size; expected bytes or a number with KiB, MiB, GiB or TiB", param, ctx)


class Module(click.ParamType):
    """`name=path` or `{"name": ..., "path": ...}` as in vLLM; a base model's name in it is ignored."""

    name = "name=path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Path]:
        if isinstance(value, tuple):
            return value
        name, _, path = value.partition("=")
        if value.lstrip().startswith("{"):
            try:
                given = json.loads(value)
            except ValueError:
                given = {}
            name, path = given.get("name"), given.get("path")
            if unknown := given.keys() - MODULE_FIELDS:
                self.fail(f"{value!r} has a field {min(unknown)!r}; known are {', '.join(MODULE_FIELDS)}", param, ctx)
        if not (isinstance(name, str) and isinstance(path, str) and name and path):
            self.fail(f"""{value!r} is neither name=path nor {{"name": "...", "path": "..."}}""", param, ctx)
        try:
            return name, Path(path).expanduser()
        except RuntimeError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


class Sizes(click.ParamType):
    """Whole numbers, comma separated."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(size) for size in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers separated by commas", param, ctx)


class Speculation(click.ParamType):
    """JSON object as in vLLM's `--speculative-config`."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> SpeculativeConfig:
        if isinstance(value, SpeculativeConfig):
            return value
        try:
            return SpeculativeConfig.parse(value)
        except ConfigError as error:
            self.fail(error.message, param, ctx)


class WholeNumber(click.IntRange):
    """Integer within bounds. Its error says in words which numbers are valid."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"expected a whole number {bounds_words(self)}; got {value}", param, ctx)


def options_of(*configs: type) -> Callable[[C], C]:
    """Add a flag for each field of the configurations that has an `Option`, in the fields' order."""

    def with_options(command: C) -> C:
        for config in reversed(configs):
            types, known = value_types(config), options(config)
            defaults = {f.name: f.default for f in fields(config)}
            for name in reversed(known):
                command = _click_option(name, known[name], types[name], defaults[name])(command)
        return command

    return with_options


def take(config: type, flags: dict[str, Any]) -> dict[str, Any]:
    """Remove a configuration's values from the command's flags and return them."""
    return {name: flags.pop(name) for name in options(config)}


def _click_option(name: str, option: Option, kind: Any, default: Any) -> Callable[[C], C]:
    flag = option.flag or "--" + name.replace("_", "-")
    settings: dict[str, Any] = {"help": option.help}
    if default is MISSING:
        settings["required"] = True
    elif option.by_device is not None:
        settings |= {"default": default, "help": f"{option.help}  [default: {_by_device(option, option.by_device)}]"}
    elif option.is_size and default is not None:
        settings |= {"default": default, "help": f"{option.help}  [default: {_size(default)}]"}
    else:
        settings |= {"default": default, "show_default": default not in (None, (), "", False)}
    if option.env is not None:
        settings["envvar"] = option.env
    has_negation = kind is bool and default is not False
    names = (f"{flag}/--no-{flag[2:]}" if has_negation else flag, *filter(None, [option.former]))
    if kind is bool:
        return click.option(name, *names, is_flag=True, **settings)
    repeats = get_origin(kind) is tuple and default == ()
    return click.option(name, *names, type=_click_type(option, kind), multiple=repeats, **settings)


def _click_type(option: Option, kind: Any) -> Any:
    if option.is_size:
        return Bytes()
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if kind == tuple[int, ...]:
        return Sizes()
    if get_origin(kind) is tuple:
        return Module() if get_args(kind)[0] is not str else str
    if kind is SpeculativeConfig:
        return Speculation()
    if kind is Path:
        return click.Path(path_type=Path)
    if kind in (int, float) and (option.least, option.most, option.above) != (None, None, None):
        bounds: dict[str, Any] = {"min": option.least, "max": option.most}
        if option.above is not None:
            bounds |= {"min": option.above, "min_open": True}
        return WholeNumber(**bounds) if kind is int else Number(**bounds)
    return kind


def _size(number: int) -> str:
    return f"{number >> 30}GiB" if number % (1 << 30) == 0 else f"{number >> 20}MiB"


def _by_device(option: Option, default: ByDevice) -> str:
    shown = [
        f"{_size(value) if option.is_size and isinstance(value, int) else value} on {place}"
        for value, place in ((default.cpu, "the CPU"), (default.gpu, "a GPU"))
        if value is not None
    ]
    return ", ".join(shown)
