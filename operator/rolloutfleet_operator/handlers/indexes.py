"""What the watches remember: one index per sort of object, each entry a small value from ``plan.observe``."""

from collections.abc import Callable, Mapping
from typing import Any

from rolloutfleet_operator.plan.observe import (
    fleet_key,
    observe_child,
    observe_fleet,
    observe_job,
    observe_node,
    observe_pod,
    observe_weightsync,
)
from rolloutfleet_operator.plan.observed import FleetBrief, Observed
from rolloutfleet_operator.reconcile.runtime import FleetKey

Index = Mapping[Any, Any]
Indexed = dict[Any, Any]


async def index_pod(body: Mapping[str, Any], **_: Any) -> Indexed:
    """Fleet -> pod."""
    return _by_fleet(body, observe_pod)


async def index_job(body: Mapping[str, Any], **_: Any) -> Indexed:
    """Fleet -> Job."""
    return _by_fleet(body, observe_job)


async def index_child(body: Mapping[str, Any], param: str, **_: Any) -> Indexed:
    """Fleet -> owned object; ``param`` is its kind, which lists leave out."""
    return _by_fleet(body, lambda raw: observe_child(param, raw))


async def index_weightsync(body: Mapping[str, Any], **_: Any) -> Indexed:
    """Fleet that is named -> WeightSync."""
    return {weightsync_key(body): observe_weightsync(body)}


async def index_fleet(body: Mapping[str, Any], **_: Any) -> Indexed:
    """Fleet -> what its WeightSyncs need to know of it."""
    return {(body["metadata"]["namespace"], body["metadata"]["name"]): observe_fleet(body)}


async def index_node(body: Mapping[str, Any], **_: Any) -> Indexed:
    """Every node under one key."""
    return {"nodes": observe_node(body)}


def weightsync_key(body: Mapping[str, Any]) -> FleetKey:
    """The fleet that a WeightSync names."""
    return (body["metadata"]["namespace"], body["spec"]["fleetRef"]["name"])


def observe_indexes(key: FleetKey, indexes: Mapping[str, Index], *, reads_nodes: bool) -> Observed:
    """Everything that the watches know of one fleet, in a fixed order."""

    def values(index: str, of: Any = key) -> list[Any]:
        return sorted(indexes[index].get(of, ()), key=lambda value: value.name)

    return Observed(
        pods=tuple(values("pods")),
        jobs=tuple(values("jobs")),
        weightsyncs=tuple(values("weightsyncs")),
        children=tuple(child for index in sorted(indexes) if index.startswith("children-") for child in values(index)),
        nodes=tuple(values("nodes", "nodes")) if reads_nodes else None,
    )


def observe_brief(key: FleetKey, indexes: Mapping[str, Index]) -> FleetBrief | None:
    """The fleet as its WeightSyncs see it, None when there is none."""
    return next(iter(indexes["fleets"].get(key, ())), None)


def _by_fleet(body: Mapping[str, Any], observe: Callable[[Mapping[str, Any]], Any]) -> Indexed:
    key = fleet_key(body)
    return {key: observe(body)} if key is not None else {}
