"""The body of a server-side apply, as both the operator and the sync job send it."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

APPLY_TYPE: Final = "application/apply-patch+yaml; charset=utf-8"
"""The parameter keeps the official client from encoding the body itself, which it would do in a way that the server refuses."""

_NOT_IN_YAML = re.compile("[\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")


def apply_body(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as JSON that the API server's YAML decoder takes.

    That decoder refuses JSON's escapes for characters outside the basic plane, which words of other programs may hold (an emoji in an
    error message is enough), so they travel as themselves; characters that YAML has no place for become U+FFFD.
    """
    return _NOT_IN_YAML.sub("\ufffd", json.dumps(manifest, ensure_ascii=False)).encode()
