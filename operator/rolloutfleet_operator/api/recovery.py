"""``spec.recovery`` and ``status.recovery``: what becomes of engines and nodes that keep failing, or are about to go."""

from typing import Annotated

from pydantic import Field

from rolloutfleet_operator.api.base import ApiModel, schema

MAX_BUDGET = 20
MAX_ENGINE_RECORDS = 256
"""Engines whose failures are remembered at once; of more, those that failed most."""
MAX_QUARANTINED = 16

Timestamp = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]


class QuarantineSpec(ApiModel):
    """When a node is avoided."""

    after_failures: int = Field(
        default=3,
        ge=0,
        le=MAX_BUDGET,
        description="afterFailures is how many failures of engines on one node within windowSeconds, while an engine of the same "
        "revision serves on another node, make new engine pods avoid that node; 0 never does.",
    )
    seconds: int = Field(default=1800, ge=60, le=604800, description="seconds is how long a node is avoided.")


class RecoverySpec(ApiModel):
    """What becomes of engines and nodes that keep failing, or are about to go."""

    restart_budget: int = Field(
        default=5,
        ge=0,
        le=MAX_BUDGET,
        description="restartBudget is how often an engine may fail within windowSeconds; with one failure more it is retired: its pod "
        "is removed and not replaced, and refits go on without it. Pulling an image, waiting for a node and being evicted are no "
        "failures. It is tried again when the pods' spec changes, the budget rises, or the fleet's annotation rolloutfleet.io/revive gets "
        "a new value: one such as 1,3@monday names engines, any other means all.",
    )
    window_seconds: int = Field(
        default=3600, ge=60, le=604800, description="windowSeconds is how far back failures are counted."
    )
    backoff_cap_seconds: int = Field(
        default=300,
        ge=1,
        le=3600,
        description="backoffCapSeconds is the longest wait before a pod that ended for good is replaced; the first wait is one "
        "second, and each further one twice as long. Containers that restart in place wait as the kubelet has them wait.",
    )
    node_loss_seconds: int = Field(
        default=30,
        ge=0,
        le=86400,
        description="nodeLossSeconds is how long an engine pod stays on a node that is not ready or unreachable before it is "
        "replaced, unless template.tolerations says so itself.",
    )
    quarantine_nodes: QuarantineSpec = Field(
        default_factory=QuarantineSpec, description="quarantineNodes says when a node is avoided."
    )
    leaving_taints: tuple[Annotated[str, Field(min_length=1, max_length=316)], ...] = Field(
        default=(),
        max_length=16,
        description="leavingTaints are keys of further taints that announce the end of a node; those that spot handlers, cluster "
        "autoscalers and cloud providers set are known.",
        json_schema_extra=schema(list_type="set"),
    )


class Failure(ApiModel):
    """One failure of an engine."""

    at: Timestamp = Field(description="at is when it was.")
    node: Annotated[str, Field(max_length=253)] = Field(
        default="", description="node is where it was; empty once the node has been avoided for it."
    )


class CountedPod(ApiModel):
    """How many failures of a pod are among the record's already."""

    uid: str = Field(max_length=64, description="uid is the pod's.")
    failures: int = Field(ge=0, description="failures is how many have been counted.")


class EngineRecord(ApiModel):
    """The failures of one engine."""

    engine: int = Field(ge=0, description="engine is the engine's number.")
    revision: str = Field(
        max_length=63, description="revision is that of the pods that failed; another one starts anew."
    )
    retired: bool = Field(default=False, description="retired says that the engine is not replaced any more.")
    message: str = Field(default="", max_length=512, description="message is the end of its last words.")
    failures: tuple[Failure, ...] = Field(
        default=(),
        max_length=MAX_BUDGET + 1,
        description="failures are those within windowSeconds, the oldest first.",
        json_schema_extra=schema(list_type="atomic"),
    )
    counted: tuple[CountedPod, ...] = Field(
        default=(),
        max_length=16,
        description="counted says which pods these failures are of.",
        json_schema_extra=schema(list_type="map", list_map_keys=["uid"]),
    )


class QuarantinedNode(ApiModel):
    """A node that new engine pods avoid."""

    node: str = Field(min_length=1, max_length=253, description="node is the node's name.")
    until: Timestamp = Field(description="until is when it is used again.")
    failures: int = Field(ge=0, description="failures is how many there were on it.")


class RecoveryStatus(ApiModel):
    """What failed, and what is done about it."""

    engines: tuple[EngineRecord, ...] = Field(
        default=(),
        max_length=MAX_ENGINE_RECORDS,
        description="engines are those that failed within recovery.windowSeconds or are retired.",
        json_schema_extra=schema(list_type="map", list_map_keys=["engine"]),
    )
    quarantined_nodes: tuple[QuarantinedNode, ...] = Field(
        default=(),
        max_length=MAX_QUARANTINED,
        description="quarantinedNodes are avoided by new engine pods.",
        json_schema_extra=schema(list_type="map", list_map_keys=["node"]),
    )
    revived: str = Field(
        default="",
        max_length=256,
        description="revived is the value of the annotation rolloutfleet.io/revive that was last obeyed.",
    )

    @property
    def retired(self) -> tuple[int, ...]:
        """The engines that are not replaced any more."""
        return tuple(sorted(record.engine for record in self.engines if record.retired))
