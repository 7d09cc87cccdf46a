"""Whether a live object still is what its manifest says."""

from collections.abc import Mapping
from typing import Any


def covers(live: Any, wanted: Any) -> bool:
    """Whether everything that the manifest says holds for the live object; what others added to maps does not count.

    Lists are compared whole, so that an entry slipped into a Role's rules is seen.
    """
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            key in live and covers(live[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(live, list) and len(live) == len(wanted) and all(map(covers, live, wanted))
    return bool(live == wanted)
