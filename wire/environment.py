"""Variables of the environment that may instead name a file with their value: NAME, or NAME_FILE with its path.

Orchestrators hand secrets to containers as files, which no process list and no `inspect` shows.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from wire.errors import ConfigError

SUFFIX = "_FILE"


def read_variable(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the value of a variable: its own, or the content of its file without surrounding white space.

    None if neither is set. Raises ConfigError, which names the variable, if both are set, or for a file that cannot be
    read or is empty.
    """
    value, path = environ.get(name), environ.get(name + SUFFIX)
    if not path:
        return value
    if value:
        raise ConfigError(name + SUFFIX, f"{name} is set as well; expected one of them")
    try:
        content = Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(name + SUFFIX, f"cannot read {path}: {reason}") from error
    if not content:
        raise ConfigError(name + SUFFIX, f"{path} is empty")
    return content
