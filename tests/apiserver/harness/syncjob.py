"""A stand-in for the sync job: it writes a WeightSync's status as the sync job does, with the sync job's own account."""

from datetime import UTC, datetime
from typing import Any

from apiserver.harness.api import Body, Cluster
from rolloutfleet_operator import naming


class SyncJobStandIn:
    """Reports for one WeightSync, under the field manager and with the rights of the fleet's sync pod."""

    def __init__(self, cluster: Cluster, namespace: str, fleet: str, weightsync: str = "") -> None:
        self.namespace = namespace
        self.weightsync = weightsync or fleet
        self.cluster = cluster.as_user(cluster.token_of(namespace, naming.sync_name(fleet)))

    def report(self, *, epoch: int, version: int, engines: int, admitted: int | None = None, **status: Any) -> Body:
        """The WeightSync after a whole status was written; fields that are not given are given up."""
        stored = self.cluster.get("WeightSync", self.namespace, self.weightsync)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {
            "type": "Ready",
            "status": "True",
            "observedGeneration": stored["metadata"]["generation"],
            "lastTransitionTime": now,
            "reason": "Serving",
            "message": "trainers are answered",
        }
        document = {
            "conditions": [ready],
            "epoch": epoch,
            "version": version,
            "phase": "Ready",
            "members": {"total": engines, "admitted": engines if admitted is None else admitted},
            **status,
        }
        manifest = {
            "apiVersion": naming.API_VERSION,
            "kind": naming.SYNC_KIND,
            "metadata": {"name": self.weightsync, "namespace": self.namespace},
            "status": document,
        }
        return self.cluster.apply(manifest, naming.SYNC_FIELD_MANAGER, "status")

    def close(self) -> None:
        self.cluster.close()
