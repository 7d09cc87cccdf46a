"""Logs of one JSON object a line: a constant message and fields."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

logger = logging.getLogger("rolloutfleet_sync")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """Renders time, level, message, fleet and whatever the call gave as ``extra``."""

    def __init__(self, fleet: str) -> None:
        super().__init__()
        self._fleet = fleet

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "fleet": self._fleet,
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(fleet: str, level: str) -> None:
    """Send everything of this level and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(fleet))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
