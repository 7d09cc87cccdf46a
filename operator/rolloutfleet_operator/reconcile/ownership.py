"""Making sure that an object is ours before it is touched."""

from collections.abc import Mapping
from typing import Any

from rolloutfleet_operator import naming
from rolloutfleet_operator.cluster.gateway import Gateway
from rolloutfleet_operator.cluster.kinds import ObjectRef
from rolloutfleet_operator.errors import (
    AlreadyExistsError,
    BlockedError,
    NotFoundError,
    OperatorError,
    OwnershipConflictError,
)
from rolloutfleet_operator.plan.observe import controller_uid
from rolloutfleet_operator.plan.observed import Observed
from rolloutfleet_operator.render.drift import covers
from rolloutfleet_operator.render.identity import FleetIdentity, Manifest


async def create_owned(gateway: Gateway, fleet: FleetIdentity, manifest: Manifest) -> bool:
    """Whether an object was made; one that is there already and ours is what a stale view looks like, and is left alone.

    Raises:
        OwnershipConflictError: the name is taken by someone else.
        BlockedError: the name is taken by a former fleet's object that is being removed.
    """
    try:
        await gateway.create(manifest)
    except AlreadyExistsError:
        await _existing(gateway, fleet, ObjectRef.of(manifest))
        return False
    return True


async def keep_applied(gateway: Gateway, fleet: FleetIdentity, manifest: Manifest, observed: Observed) -> bool:
    """Whether the object had to be written to be what its manifest says.

    Raises:
        OwnershipConflictError: the name is taken by someone else.
        BlockedError: the name is taken by an object that is being removed.
    """
    ref = ObjectRef.of(manifest)
    known = [child for child in observed.children if child.kind == ref.kind and child.name == ref.name]
    live: Mapping[str, Any] | None = known[0].content if known and known[0].owner_uid == fleet.uid else None
    if live is None:
        live = await _existing(gateway, fleet, ref)
    if live is not None and "deletionTimestamp" in live["metadata"]:
        raise BlockedError(f"{ref} is being removed; it is made anew once it is gone")
    if live is not None and covers(live, _comparable(manifest)):
        return False
    # Without force on creation: a field that someone set meanwhile is a conflict, not ours to take.
    await gateway.apply(manifest, force=live is not None)
    return True


async def _existing(gateway: Gateway, fleet: FleetIdentity, ref: ObjectRef) -> Mapping[str, Any] | None:
    """The stored object when it is ours, None when there is none."""
    try:
        body = await gateway.get(ref)
    except NotFoundError:
        return None
    if controller_uid(body) != fleet.uid:
        raise foreign(fleet, ref, body)
    return body


def foreign(fleet: FleetIdentity, ref: ObjectRef, body: Mapping[str, Any]) -> OperatorError:
    """The error for an object that is not this fleet's."""
    owners = body["metadata"].get("ownerReferences") or ()
    former = any(o.get("kind") == naming.FLEET_KIND and o.get("name") == fleet.name for o in owners)
    if former:
        return BlockedError(f"{ref} belongs to a former fleet of this name and is still being removed")
    names = ", ".join(sorted(f"{owner.get('kind')} {owner.get('name')}" for owner in owners)) or "nobody"
    return OwnershipConflictError(
        f"{ref} exists and is owned by {names}, not by fleet {fleet.name}; delete or rename it, or name the fleet otherwise"
    )


def _comparable(manifest: Manifest) -> dict[str, Any]:
    """The manifest without what watches do not carry along."""
    return {key: value for key, value in manifest.items() if key not in ("apiVersion", "kind")}
