"""Where roster and status live: what a source of the one and a store of the other must offer, and the document that is stored."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from pydantic import ValidationError

from rolloutfleet.contract.members import Roster
from rolloutfleet_sync.protocol.record import Record
from rolloutfleet_sync.protocol.summary import Readiness, bound_history


class StoreError(Exception):
    """The status could not be read or written, or nobody knows whether it was."""


class StoreConflictError(StoreError):
    """Somebody else has changed epoch, version or intent."""


class RosterSource(Protocol):
    """Tells who belongs to the fleet."""

    def watch(self) -> AsyncIterator[Roster]:
        """Every roster from the present one on; ends only with its task."""
        ...


class StatusStore(Protocol):
    """Keeps the WeightSync's status."""

    async def read(self) -> Record:
        """The durable record; raises StoreError."""
        ...

    async def write(self, status: Mapping[str, Any], readiness: Readiness, seconds: float) -> None:
        """Store the whole status within this time; raises StoreError, and StoreConflictError when somebody else wrote."""
        ...


def parse_record(status: Mapping[str, Any], where: str) -> Record:
    """The durable part of a stored status; StoreError when it cannot be understood."""
    try:
        return Record.model_validate(status)
    except ValidationError as error:
        raise StoreError(f"the status of {where} cannot be understood: {error}") from error


def merge_history(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The refits of both, each once, the newest last, as many as a status holds."""
    told = {entry.get("refit") for entry in now}
    return bound_history([dict(entry) for entry in (*(e for e in before if e.get("refit") not in told), *now)])


def render_document(
    status: Mapping[str, Any], readiness: Readiness, previous: Mapping[str, Any], generation: int, now: str
) -> dict[str, Any]:
    """The status as it is stored: with its condition, times that move only when what they stand beside has changed, and the refits of
    sync jobs before this one."""
    document = dict(status)
    if "lastRefit" not in document and previous.get("lastRefit"):
        document["lastRefit"] = previous["lastRefit"]
    refits = merge_history(previous.get("refits") or (), document.get("refits") or ())
    if refits:
        document["refits"] = refits
    session = document.get("session")
    if session is not None:
        known = previous.get("session") or {}
        opened = known.get("openedAt") if known.get("id") == session["id"] else None
        document["session"] = {**session, "openedAt": opened or now}
    state = "True" if readiness.status else "False"
    old: Mapping[str, Any] = next((c for c in previous.get("conditions") or () if c.get("type") == "Ready"), {})
    document["conditions"] = [
        {
            "type": "Ready",
            "status": state,
            "observedGeneration": generation,
            "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == state else now,
            "reason": readiness.reason,
            "message": readiness.message,
        }
    ]
    return document
