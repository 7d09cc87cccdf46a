"""The operator's handlers: indexes, wake-ups, and one daemon per RolloutFleet and per WeightSync.

There are no create, update, field or delete handlers: a daemon covers creation, resumption and deletion alike, and leaves nothing on the
object but one finalizer, which goes as soon as the daemon has ended.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import kopf

from rolloutfleet_operator import naming
from rolloutfleet_operator.cluster.kinds import ObjectRef
from rolloutfleet_operator.handlers import settings as kinds
from rolloutfleet_operator.handlers.indexes import (
    index_child,
    index_fleet,
    index_job,
    index_node,
    index_pod,
    index_weightsync,
    observe_brief,
    observe_indexes,
    weightsync_key,
)
from rolloutfleet_operator.handlers.login import login
from rolloutfleet_operator.plan.observe import (
    fleet_key,
    observe_child,
    observe_fleet,
    observe_job,
    observe_node,
    observe_pod,
    observe_weightsync,
)
from rolloutfleet_operator.plan.observed import FleetBrief, WeightSync
from rolloutfleet_operator.reconcile.loop import drive_fleet
from rolloutfleet_operator.reconcile.runtime import FleetKey, Runtime
from rolloutfleet_operator.reconcile.weightsyncs import drive_weightsync, hand_over, sync_wake_key
from rolloutfleet_operator.status.conditions import Event

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""A daemon that has not ended by itself after this long is cancelled."""
RESTART_SECONDS = 15.0
"""A daemon that died of an error is started anew after this long."""

Body = Mapping[str, Any]


class Handlers:
    """The handlers of one process, and the registry that holds them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.registry = kopf.OperatorRegistry()
        self._register_indexes()
        self._register_wakes()
        self._register_daemons()
        kopf.on.login(registry=self.registry)(login)

    def _register_indexes(self) -> None:
        indexes: list[tuple[tuple[str, str, str], str, Any, str | None]] = [
            (kinds.PODS, "pods", index_pod, None),
            (kinds.JOBS, "jobs", index_job, None),
            (kinds.WEIGHTSYNCS, "weightsyncs", index_weightsync, None),
            (kinds.FLEETS, "fleets", index_fleet, None),
            *((where, f"children-{kind}", index_child, kind) for kind, where in sorted(kinds.CHILD_KINDS.items())),
        ]
        if self._runtime.reads_nodes:
            indexes.append((kinds.NODES, "nodes", index_node, None))
        for where, name, function, param in indexes:
            kopf.index(*where, id=name, param=param, registry=self.registry)(function)

    def _register_wakes(self) -> None:
        observers: list[tuple[tuple[str, str, str], Callable[[Body], Any]]] = [
            (kinds.PODS, observe_pod),
            (kinds.JOBS, observe_job),
            *((where, _child_observer(kind)) for kind, where in sorted(kinds.CHILD_KINDS.items())),
        ]
        wake_owner: Any = self._wake_owner  # kopf's protocols name every keyword that it passes
        for where, observe in observers:
            kopf.on.event(*where, id=f"wake-{where[2]}", param=observe, registry=self.registry)(wake_owner)
        kopf.on.event(*kinds.FLEETS, id="wake-fleets", registry=self.registry)(self._wake_fleet)
        kopf.on.event(*kinds.WEIGHTSYNCS, id="wake-weightsyncs", registry=self.registry)(self._wake_weightsync)
        if self._runtime.reads_nodes:
            kopf.on.event(*kinds.NODES, id="wake-nodes", registry=self.registry)(self._wake_everyone)

    def _register_daemons(self) -> None:
        daemons: list[tuple[tuple[str, str, str], str, Any]] = [
            (kinds.FLEETS, "fleet", self._fleet_daemon),
            (kinds.WEIGHTSYNCS, "weightsync", self._weightsync_daemon),
        ]
        for where, name, function in daemons:
            kopf.daemon(
                *where,
                id=name,
                registry=self.registry,
                backoff=RESTART_SECONDS,
                cancellation_backoff=STOP_SECONDS,
                cancellation_timeout=STOP_SECONDS,
                errors=kopf.ErrorsMode.TEMPORARY,
            )(function)

    async def _wake_owner(self, body: Body, event: Mapping[str, Any], param: Callable[[Body], Any], **_: Any) -> None:
        """A child's event wakes its fleet only when something that matters has changed."""
        key = fleet_key(body)
        payload = None if event["type"] == "DELETED" else param(body)
        if key is not None and self._runtime.wakes.changed(body["metadata"]["uid"], payload):
            self._runtime.wakes.wake(key)

    async def _wake_fleet(self, body: Body, event: Mapping[str, Any], **_: Any) -> None:
        """The fleet's own event wakes its loop on a new generation or its deletion, not on the loop's own status writes."""
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        brief = None if event["type"] == "DELETED" else observe_fleet(body)
        if self._runtime.wakes.changed(("weights", body["metadata"]["uid"]), brief):
            self._runtime.wakes.wake(sync_wake_key(namespace, name))
        core = dataclasses.replace(brief, epoch=0, version=0) if brief is not None else None
        if self._runtime.wakes.changed(body["metadata"]["uid"], core):
            self._runtime.wakes.wake((namespace, name))

    async def _wake_weightsync(self, body: Body, event: Mapping[str, Any], **kwargs: Any) -> None:
        """A WeightSync's event wakes its fleet, unless nothing but our own condition has changed.

        One that is being deleted is held up until its fleet has taken its version over: kopf lets go of the object only when this handler
        has ended. Not in the daemon, since there is none for an object that was deleted while no operator ran.
        """
        payload = None if event["type"] == "DELETED" else _without_own_condition(observe_weightsync(body))
        key = weightsync_key(body)
        if self._runtime.wakes.changed(body["metadata"]["uid"], payload):
            self._runtime.wakes.wake(key)
            self._runtime.wakes.wake(sync_wake_key(*key))
        if payload is not None and payload.terminating and naming.FINALIZER in body["metadata"].get("finalizers", ()):
            await self._hand_over(key, body, kwargs["fleets"])

    async def _hand_over(self, key: FleetKey, body: Body, fleets: Mapping[Any, Any]) -> None:
        def look() -> tuple[WeightSync, FleetBrief | None]:
            return observe_weightsync(body), observe_brief(key, {"fleets": fleets})

        try:
            await hand_over(self._runtime, *key, look)
        except TimeoutError:
            fields = {"namespace": key[0], "fleet": key[1], "weightsync": body["metadata"]["name"]}
            log.warning("WeightSync went before its fleet took over its version", extra={"fields": fields})

    async def _wake_everyone(self, body: Body, event: Mapping[str, Any], **_: Any) -> None:
        """A node's event concerns every fleet, when its resources have changed."""
        payload = None if event["type"] == "DELETED" else observe_node(body)
        if self._runtime.wakes.changed(body["metadata"]["uid"], payload):
            self._runtime.wakes.wake_all()

    async def _fleet_daemon(self, namespace: str, name: str, stopped: Any, **kwargs: Any) -> None:
        indexes = self._indexes(kwargs)
        reads_nodes = self._runtime.reads_nodes
        await drive_fleet(
            self._runtime,
            (namespace, name),
            lambda: observe_indexes((namespace, name), indexes, reads_nodes=reads_nodes),
            _emit,
            stopped,
        )

    async def _weightsync_daemon(self, namespace: str, name: str, body: Body, stopped: Any, **kwargs: Any) -> None:
        indexes = self._indexes(kwargs)
        key = weightsync_key(body)

        def look() -> tuple[WeightSync, FleetBrief | None]:
            return observe_weightsync(body), observe_brief(key, indexes)

        ref = ObjectRef(naming.SYNC_KIND, namespace, name)
        await drive_weightsync(self._runtime, ref, key[1], look, stopped)

    def _indexes(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        names = ["pods", "jobs", "weightsyncs", "fleets", *(f"children-{kind}" for kind in kinds.CHILD_KINDS)]
        return {name: kwargs[name] for name in [*names, *(["nodes"] if self._runtime.reads_nodes else [])]}


def _child_observer(kind: str) -> Callable[[Body], Any]:
    return lambda body: observe_child(kind, body)


def _without_own_condition(sync: WeightSync) -> WeightSync:
    conditions = [c for c in sync.status.get("conditions") or () if c.get("type") != "Active"]
    return dataclasses.replace(sync, status={**sync.status, "conditions": conditions})


def _emit(body: Any, event: Event) -> None:
    kopf.event(body, type="Warning" if event.warning else "Normal", reason=event.reason, message=event.message[:1024])
