"""What the operator knows of the cluster: small, frozen, comparable, so that a change worth a pass is a changed value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

JOB_ROLES = frozenset({"sync", "checkpoint"})
"""Pods that belong to a Job."""


@dataclass(frozen=True, slots=True)
class ContainerState:
    """What the kubelet says of a pod's first container."""

    started: bool = False
    restarts: int = 0
    waiting_reason: str = ""
    waiting_message: str = ""
    exit_code: int = 0
    """Of the last end; 0 when it has not ended."""
    exit_reason: str = ""
    exit_message: str = ""
    """The last termination message: the engine's own words."""
    ended_at: datetime | None = None
    """When it last ended."""

    @property
    def up(self) -> bool:
        """Whether it runs and has come up."""
        return self.started and not self.waiting_reason


@dataclass(frozen=True, slots=True)
class Pod:
    """An engine pod, or one of a Job."""

    name: str
    uid: str
    owner_uid: str
    role: str
    phase: str
    created: datetime
    ready: bool = False
    terminating: bool = False
    address: str = ""
    node: str = ""
    engine: int = 0
    rank: int = 0
    """Which of its engine's pods this is; 0 is the leader."""
    incarnation: int = 0
    revision: str = ""
    ranks: int = 1
    """Of its engine."""
    pods: int = 1
    """Of its engine."""
    parts: tuple["Pod", ...] = ()
    """Where this stands for an engine of several pods: each of them that exists, by rank."""
    container: ContainerState = field(default_factory=ContainerState)
    unschedulable: str = ""
    """The scheduler's message while it finds no node."""
    sandbox_missing: bool = False
    """Scheduled, but its volumes or its network are not there yet."""
    mounts: str = ""
    """While the sandbox is missing: what its containers mount, in words."""
    disrupted: bool = False
    """It was evicted, preempted or drained, or is about to be: its end is no failure of its own."""
    leaving: str = ""
    """Why it is about to be taken away while it serves still; empty when nobody has announced that."""

    @property
    def dead(self) -> bool:
        """Whether it has ended for good and must be replaced."""
        return self.phase in ("Failed", "Succeeded")

    @property
    def live(self) -> bool:
        """Whether it runs, or may still."""
        return not self.terminating and not self.dead


@dataclass(frozen=True, slots=True)
class Job:
    """The sync Job, or one that sends a checkpoint."""

    name: str
    uid: str
    owner_uid: str
    terminating: bool = False
    finished: str = ""
    """``Failed`` or ``Complete``, empty while it runs."""
    message: str = ""
    role: str = "sync"
    revision: str = ""


@dataclass(frozen=True, slots=True)
class WeightSync:
    """A WeightSync of the fleet."""

    name: str
    uid: str
    generation: int
    created: datetime
    terminating: bool
    floor_epoch: int
    floor_version: int
    status: Mapping[str, Any]
    """As stored; parsed where it is used."""
    checkpoint: int | None = None
    """The version that it brings out of a checkpoint; None where trainers come and go."""
    owner_uid: str = ""


@dataclass(frozen=True, slots=True)
class Child:
    """An owned object whose content is compared: Service, ConfigMap, ServiceAccount, Role, RoleBinding."""

    kind: str
    name: str
    uid: str
    owner_uid: str
    terminating: bool
    content: Mapping[str, Any]
    """The manifest without ``status`` and without the server's own metadata."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node, as far as engines care."""

    name: str
    extended: tuple[tuple[str, int], ...]
    """Allocatable extended resources, sorted by name."""
    taints: tuple[str, ...] = ()
    """Keys of its taints, sorted."""


@dataclass(frozen=True, slots=True)
class FleetBrief:
    """What a WeightSync needs to know of its fleet."""

    uid: str
    generation: int
    terminating: bool
    epoch: int
    version: int
    """Epoch and version as the fleet's status holds them."""
    revive: str = ""
    """The value of the annotation that gives retired engines another chance."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything of one fleet, as the watches know it; nodes are None when they may not be read."""

    pods: tuple[Pod, ...] = ()
    jobs: tuple[Job, ...] = ()
    weightsyncs: tuple[WeightSync, ...] = ()
    children: tuple[Child, ...] = ()
    nodes: tuple[Node, ...] | None = None

    def engine_pods(self, fleet_uid: str) -> tuple[Pod, ...]:
        """The fleet's own engine pods, by name."""
        own = (p for p in self.pods if p.role not in JOB_ROLES and p.owner_uid == fleet_uid)
        return tuple(sorted(own, key=lambda pod: pod.name))

    def sync_pods(self) -> tuple[Pod, ...]:
        """The sync pods, by name; their owner is the Job."""
        return tuple(sorted((p for p in self.pods if p.role == "sync"), key=lambda pod: pod.name))

    def foreign_engine_pods(self, fleet_uid: str) -> tuple[Pod, ...]:
        """Engine pods of a former fleet of the same name: their names are taken, and they count for nothing else."""
        return tuple(p for p in self.pods if p.role not in JOB_ROLES and p.owner_uid != fleet_uid)

    def jobs_of(self, role: str) -> tuple[Job, ...]:
        """The Jobs of one kind, by name."""
        return tuple(sorted((job for job in self.jobs if job.role == role), key=lambda job: job.name))
