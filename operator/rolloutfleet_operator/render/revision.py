"""Stable names for what was rendered."""

import hashlib
import json
from typing import Any

REVISION_LENGTH = 10


def revision_of(content: Any) -> str:
    """Ten hex digits that change whenever the content does; fit for a label value and a name."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:REVISION_LENGTH]


def compact_json(content: Any) -> str:
    """JSON with sorted keys, the same bytes for the same content."""
    return json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
