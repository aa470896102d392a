"""Model folder made from a GGUF file: config, tokenizer and chat template as files, the weights as a link.

Meant for programs that do not read GGUF, such as the gateway, which has neither torch nor numpy: `python -m
engine.model.gguf.folder FILE FOLDER`.
"""

import json
import sys
from pathlib import Path

from engine.model.config import read_config
from engine.model.gguf.tokenizer import read_parts
from wire.errors import ConfigError
from wire.text.tokenizer import TokenizerError


def write_folder(gguf: Path, folder: Path) -> None:
    """Create `folder`, which must not exist. Raises ConfigError, TokenizerError or OSError."""
    config, parts = read_config(gguf), read_parts(gguf)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    parts.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(parts.special, ensure_ascii=False) + "\n", "utf-8")
    if parts.template is not None:
        (folder / "chat_template.jinja").write_text(parts.template, "utf-8")
    (folder / "model.gguf").symlink_to(gguf.absolute())


if __name__ == "__main__":
    try:
        write_folder(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ConfigError, TokenizerError, OSError) as refusal:
        sys.exit(str(refusal))
