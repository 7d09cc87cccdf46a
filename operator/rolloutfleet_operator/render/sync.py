"""The sync job: its identity, its rights, its Job, and the WeightSync that it serves."""

from dataclasses import dataclass

from rolloutfleet.contract import names
from rolloutfleet_operator import naming
from rolloutfleet_operator.api.fleet import RolloutFleetSpec
from rolloutfleet_operator.config import Images
from rolloutfleet_operator.render.identity import FleetIdentity, Manifest
from rolloutfleet_operator.render.revision import revision_of
from rolloutfleet_operator.render.security import container_security, pod_security

CONTAINER = "sync"
NEVER_GIVE_UP = 1_000_000
NODE_LOSS_TOLERATION_SECONDS = 5
STOP_SECONDS = 40
"""Longer than the sync server takes to abort a refit and to say goodbye to its trainer when it is asked to end."""


@dataclass(frozen=True, slots=True)
class SyncJob:
    """A rendered sync Job and the name that its template gives it."""

    name: str
    manifest: Manifest


def render_sync_access(fleet: FleetIdentity, weightsync: str) -> list[Manifest]:
    """The sync pod's ServiceAccount, and a Role for its own WeightSync and the roster, nothing else."""
    name = naming.sync_name(fleet.name)
    metadata = fleet.metadata(name, naming.ROLE_SYNC)
    rules = [
        {
            "apiGroups": [names.GROUP],
            "resourceNames": [weightsync],
            "resources": [naming.SYNC_PLURAL],
            "verbs": ["get"],
        },
        {
            "apiGroups": [names.GROUP],
            "resourceNames": [weightsync],
            "resources": [f"{naming.SYNC_PLURAL}/status"],
            "verbs": ["get", "patch"],
        },
        {
            "apiGroups": [""],
            "resourceNames": [naming.members_name(fleet.name)],
            "resources": ["configmaps"],
            "verbs": ["get", "list", "watch"],
        },
    ]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": fleet.namespace}
    rbac = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": "v1", "automountServiceAccountToken": False, "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": rbac, "kind": "Role", "metadata": metadata, "rules": rules},
        {"apiVersion": rbac, "kind": "RoleBinding", "metadata": metadata, "roleRef": role, "subjects": [subject]},
    ]


def render_sync_job(fleet: FleetIdentity, spec: RolloutFleetSpec, weightsync: str, images: Images) -> SyncJob:
    """The Job that runs the sync server for one WeightSync; its name changes with its template."""
    labels = {**fleet.labels(naming.ROLE_SYNC), naming.LABEL_WEIGHTSYNC: weightsync}
    template: Manifest = {
        "metadata": {"labels": dict(sorted(labels.items()))},
        "spec": {
            "automountServiceAccountToken": True,
            "containers": [_container(fleet, spec, weightsync, images)],
            "enableServiceLinks": False,
            "restartPolicy": "OnFailure",
            "securityContext": pod_security(),
            "serviceAccountName": naming.sync_name(fleet.name),
            "terminationGracePeriodSeconds": STOP_SECONDS,
            "tolerations": [
                {
                    "effect": "NoExecute",
                    "key": f"node.kubernetes.io/{trouble}",
                    "operator": "Exists",
                    "tolerationSeconds": NODE_LOSS_TOLERATION_SECONDS,
                }
                for trouble in ("not-ready", "unreachable")
            ],
            "volumes": [
                {
                    "name": f"{naming.VOLUME_PREFIX}token",
                    "secret": {"defaultMode": 0o440, "secretName": naming.token_name(fleet.name)},
                },
                {"emptyDir": {}, "name": f"{naming.VOLUME_PREFIX}tmp"},
            ],
        },
    }
    if spec.template.image_pull_secrets:
        template["spec"]["imagePullSecrets"] = [secret.body() for secret in spec.template.image_pull_secrets]
    name = naming.sync_job_name(fleet.name, revision_of(template))
    metadata = fleet.metadata(name, naming.ROLE_SYNC, {naming.LABEL_WEIGHTSYNC: weightsync})
    job = {"backoffLimit": NEVER_GIVE_UP, "completions": 1, "parallelism": 1, "template": template}
    return SyncJob(name, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job})


def render_standing_weightsync(fleet: FleetIdentity, epoch: int, version: int) -> Manifest:
    """The WeightSync that every fleet has: trainers come and go."""
    return {
        "apiVersion": naming.API_VERSION,
        "kind": naming.SYNC_KIND,
        "metadata": fleet.metadata(naming.standing_weightsync_name(fleet.name), naming.ROLE_SYNC),
        "spec": {"floor": _floor(epoch, version), "fleetRef": {"name": fleet.name}, "trainer": {}},
    }


def render_floor(fleet: FleetIdentity, weightsync: str, epoch: int, version: int) -> Manifest:
    """The part of a WeightSync that the operator owns when it takes over from an older one."""
    return {
        "apiVersion": naming.API_VERSION,
        "kind": naming.SYNC_KIND,
        "metadata": {"name": weightsync, "namespace": fleet.namespace},
        "spec": {"floor": _floor(epoch, version)},
    }


def _floor(epoch: int, version: int) -> Manifest:
    return {"epoch": epoch, "version": version}


def _container(fleet: FleetIdentity, spec: RolloutFleetSpec, weightsync: str, images: Images) -> Manifest:
    environment = {
        names.ENV_FLEET: fleet.name,
        names.ENV_FLEET_UID: fleet.uid,
        names.ENV_NAMESPACE: fleet.namespace,
        names.ENV_SYNC: weightsync,
        names.ENV_MODEL: spec.served_name,
        names.ENV_TOKEN_FILE: names.TOKEN_FILE,
        names.ENV_REFIT_POLICY: spec.refit_policy.model_dump_json(by_alias=True),
        "HOME": "/tmp",  # noqa: S108  a volume of the pod's own
    }
    from_pod = {
        names.ENV_POD_NAME: "metadata.name",
        names.ENV_POD_UID: "metadata.uid",
        names.ENV_POD_IP: "status.podIP",
    }
    return {
        "command": ["python3", "-m", "rolloutfleet_sync"],
        "env": [
            *({"name": name, "value": value} for name, value in environment.items()),
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in from_pod.items()),
        ],
        "image": images.operator,
        "livenessProbe": _probe("live", periodSeconds=10, timeoutSeconds=5, failureThreshold=3),
        "name": CONTAINER,
        "ports": [{"containerPort": names.SYNC_PORT, "name": "sync", "protocol": "TCP"}],
        "readinessProbe": _probe("ready", periodSeconds=1, timeoutSeconds=5, failureThreshold=3),
        "resources": {"limits": {"memory": "1Gi"}, "requests": {"cpu": "100m", "memory": "256Mi"}},
        "securityContext": container_security(),
        "volumeMounts": [
            {"mountPath": names.TOKEN_DIRECTORY, "name": f"{naming.VOLUME_PREFIX}token", "readOnly": True},
            {"mountPath": "/tmp", "name": f"{naming.VOLUME_PREFIX}tmp"},  # noqa: S108
        ],
    }


def _probe(answer: str, **timing: int) -> Manifest:
    return {"httpGet": {"path": f"/healthz/{answer}", "port": "sync"}, **timing}
