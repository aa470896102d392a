"""First start of docker-compose.yml: the secrets as files for the other services, and the demo model if none is given.

Without MODEL_DIR the installation is a demo: secrets that the environment lacks are generated once and kept, and the
demo model is downloaded. With MODEL_DIR every secret must be given. Each service mounts only its own folder of secrets:

gateway/    database_url, internal_token, admin_key, key_pepper   (0600)
engine/     internal_token                                        (0600)
postgres/   password                                              (0444, because its server runs as another user)
"""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

from loraplex.models import ensure_demo_model
from loraplex.up.datadir import write_private
from wire.errors import ConfigError

# Variables of .env, and the folder and file in which each is kept.
GIVEN = {
    "POSTGRES_PASSWORD": "postgres/password",
    "LORAPLEX_INTERNAL_TOKEN": "gateway/internal_token",
    "LORAPLEX_ADMIN_KEY": "gateway/admin_key",
    "LORAPLEX_KEY_PEPPER": "gateway/key_pepper",
}
# Name of the demo model's own folder in the model folder.
WORK = ".demo"


def is_demo(environ: Mapping[str, str]) -> bool:
    return not environ.get("MODEL_DIR")


def write_secrets(folder: Path, environ: Mapping[str, str]) -> None:
    """Write the secrets' files. A value of the environment replaces an earlier one.

    Raises ConfigError that names the first missing variable if this is not a demo.
    """
    values = {name: _value(name, folder / path, environ) for name, path in GIVEN.items()}
    url = f"postgresql://loraplex:{quote(values['POSTGRES_PASSWORD'], safe='')}@postgres:5432/loraplex"
    files = {GIVEN[name]: value for name, value in values.items()}
    files |= {"gateway/database_url": url, "engine/internal_token": values["LORAPLEX_INTERNAL_TOKEN"]}
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_private(folder / path, content + "\n")
    (folder / GIVEN["POSTGRES_PASSWORD"]).chmod(0o444)


def _value(name: str, path: Path, environ: Mapping[str, str]) -> str:
    if given := environ.get(name):
        return given
    if not is_demo(environ):
        raise ConfigError(name, "is required with MODEL_DIR; set it in .env (deploy/README.md)")
    return path.read_text().strip() if path.exists() else secrets.token_urlsafe(32)


def write_demo_model(folder: Path, say: Callable[[str], None]) -> None:
    """Fetch the demo model into the folder, or check what an earlier call fetched. Raises ModelError.

    Its files are links into a folder that `ensure_demo_model` replaces as a whole.
    """
    made = ensure_demo_model(folder / WORK, say)
    for path in made.iterdir():
        link, target = folder / path.name, path.relative_to(folder)
        if not link.is_symlink():
            link.symlink_to(target)
