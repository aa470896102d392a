"""Format of the gateway's log: text, or a JSON object a line for log collectors."""

import json
import logging
from datetime import UTC, datetime
from typing import Literal

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


def set_up_logging(kind: LogFormat) -> None:
    """Log to stderr in this format."""
    # Neither form names the thread, the process or the source line, so they are not looked up for each record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if kind == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
