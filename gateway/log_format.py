"""Format of the gateway's log: text, or a JSON object a line for log collectors."""

import json
import logging
from datetime import UTC, datetime
from typing import Literal

from wire.escaping import escaped

LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
# Attribute of a record with further fields, set with `extra=`.
FIELDS = "fields"


class JsonFormatter(logging.Formatter):
    """Format a record as one line of JSON: `at`, `level`, `logger`, `message`, the record's fields, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Format a record as one line of text; only an exception adds lines.

    A message may quote another program, such as a foreign server's reason for a refusal. A newline in it would begin a
    line that looks like one of the gateway.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return line if line.isprintable() else escaped(line)


def set_up_logging(kind: LogFormat) -> None:
    """Log to stderr in this format."""
    # Neither form names the thread, the process or the source line, so they are not looked up for each record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
