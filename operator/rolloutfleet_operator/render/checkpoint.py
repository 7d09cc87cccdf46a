"""The Jobs that send a checkpoint, and the WeightSync that tells of them."""

from dataclasses import dataclass

from rolloutfleet.contract import names
from rolloutfleet.contract.environment import communication_environment
from rolloutfleet_operator import naming
from rolloutfleet_operator.api.fleet import RolloutFleetSpec
from rolloutfleet_operator.api.weights import CheckpointSpec
from rolloutfleet_operator.config import Images
from rolloutfleet_operator.render.identity import FleetIdentity, Manifest
from rolloutfleet_operator.render.revision import revision_of
from rolloutfleet_operator.render.security import container_security, pod_security

CONTAINER = "checkpoint"
CHECKPOINT_PATH = "/checkpoint"
"""Where a checkpoint is mounted that lies in a volume."""
TERMINATION_LOG = "/dev/termination-log"

RETRIES = 5
"""Each after a longer wait, from ten seconds on."""
KEPT_SECONDS = 3600
"""How long an ended Job stays for people to look at; what it came to stands in its WeightSync."""
KEPT_REPAIR_SECONDS = 300
WAIT_SECONDS = 120
"""How long the Job waits for the sync job to answer, and for another trainer to let go."""
START_SECONDS = 3600
"""For images to be pulled and nodes to be found, and for all the waits between tries."""
FINAL_EXITS = (3, 4)
"""Exit codes of the command after which another try cannot help: published already, or a checkpoint that does not fit."""


@dataclass(frozen=True, slots=True)
class CheckpointJob:
    """A rendered Job, with the revision that changes with anything in it."""

    name: str
    revision: str
    manifest: Manifest


def render_checkpoint_job(
    fleet: FleetIdentity, spec: RolloutFleetSpec, checkpoint: CheckpointSpec, images: Images, *, repair: bool = False
) -> CheckpointJob:
    """The Job that sends the checkpoint as trainer; with ``repair``, as the committed version, to engines that lack it."""
    naming_of = naming.repair_name if repair else naming.checkpoint_name
    name = naming_of(fleet.name, checkpoint.version)
    seconds = _refit_seconds(spec)
    template: Manifest = {
        "metadata": {"labels": dict(sorted(fleet.labels(naming.ROLE_CHECKPOINT).items()))},
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [_container(fleet, spec, checkpoint, images, name, seconds, repair=repair)],
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "securityContext": pod_security(),
            "tolerations": [toleration.body() for toleration in spec.template.tolerations],
            "volumes": _volumes(fleet, checkpoint),
        },
    }
    overlay = {
        "imagePullSecrets": [secret.body() for secret in spec.template.image_pull_secrets],
        "nodeSelector": dict(sorted(spec.template.node_selector.items())),
        "serviceAccountName": spec.template.service_account_name,
    }
    template["spec"] |= {field: value for field, value in overlay.items() if value}
    job = {
        "activeDeadlineSeconds": START_SECONDS + 2 * seconds,
        "backoffLimit": RETRIES,
        "completions": 1,
        "parallelism": 1,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(FINAL_EXITS)},
                },
                {"action": "Ignore", "onPodConditions": [{"status": "True", "type": "DisruptionTarget"}]},
            ]
        },
        "template": template,
        "ttlSecondsAfterFinished": KEPT_REPAIR_SECONDS if repair else KEPT_SECONDS,
    }
    revision = revision_of(job)
    metadata = fleet.metadata(name, naming.ROLE_CHECKPOINT, {naming.LABEL_REVISION: revision})
    return CheckpointJob(name, revision, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job})


def render_checkpoint_weightsync(fleet: FleetIdentity, checkpoint: CheckpointSpec) -> Manifest:
    """The WeightSync of one checkpoint."""
    return {
        "apiVersion": naming.API_VERSION,
        "kind": naming.SYNC_KIND,
        "metadata": fleet.metadata(naming.checkpoint_name(fleet.name, checkpoint.version), naming.ROLE_CHECKPOINT),
        "spec": {
            "checkpoint": {"place": place_of(checkpoint), "version": checkpoint.version},
            "fleetRef": {"name": fleet.name},
        },
    }


def place_of(checkpoint: CheckpointSpec) -> str:
    """Where the checkpoint is, in words."""
    if checkpoint.persistent_volume_claim is not None:
        claim = checkpoint.persistent_volume_claim
        return f"PersistentVolumeClaim {claim.claim_name}{f', {claim.path}' if claim.path else ''}"
    if checkpoint.host_path is not None:
        return f"hostPath {checkpoint.host_path.path}"
    return checkpoint.uri or ""


def _refit_seconds(spec: RolloutFleetSpec) -> int:
    deadlines = spec.refit.deadlines
    phases: list[int] = list(deadlines.model_dump().values())
    return sum(phases)


def _container(
    fleet: FleetIdentity,
    spec: RolloutFleetSpec,
    checkpoint: CheckpointSpec,
    images: Images,
    name: str,
    seconds: int,
    *,
    repair: bool,
) -> Manifest:
    command = ["python3", "-m", "rolloutfleet", "refit", fleet.name, f"--namespace={fleet.namespace}"]
    command += [
        f"--checkpoint={checkpoint.uri or CHECKPOINT_PATH}",
        f"--version={checkpoint.version}",
        f"--name={name}",
    ]
    command += [f"--token-file={names.TOKEN_FILE}", f"--timeout={seconds}", f"--wait={WAIT_SECONDS}"]
    command += [f"--termination-log={TERMINATION_LOG}", *(["--repair"] if repair else [])]
    given = {variable.name: variable.value for variable in spec.engine.env if variable.value is not None}
    environment = {
        # Images for GPUs ask for all of them; this needs none, and trainers that see one take part in NCCL.
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": "/tmp",  # noqa: S108  a volume of the pod's own
        "NVIDIA_VISIBLE_DEVICES": "void",
        "USER": "rolloutfleet",
        **communication_environment(given),
    }
    resources = checkpoint.resources
    container: Manifest = {
        "command": command,
        "env": [{"name": key, "value": value} for key, value in sorted(environment.items())],
        "image": spec.engine.image or images.worker,
        "name": CONTAINER,
        "resources": {
            "requests": {"cpu": "500m", "memory": "1Gi"} | dict(sorted(resources.requests.items())),
            **({"limits": dict(sorted(resources.limits.items()))} if resources.limits else {}),
        },
        "securityContext": container_security(),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(checkpoint),
    }
    if checkpoint.secret_ref is not None:
        container["envFrom"] = [{"secretRef": {"name": checkpoint.secret_ref.name}}]
    return container


def _volumes(fleet: FleetIdentity, checkpoint: CheckpointSpec) -> list[Manifest]:
    volumes: list[Manifest] = [
        {
            "name": f"{naming.VOLUME_PREFIX}token",
            "secret": {"defaultMode": 0o440, "secretName": naming.token_name(fleet.name)},
        },
        {"emptyDir": {}, "name": f"{naming.VOLUME_PREFIX}tmp"},
    ]
    name = f"{naming.VOLUME_PREFIX}checkpoint"
    if checkpoint.persistent_volume_claim is not None:
        claim = {"claimName": checkpoint.persistent_volume_claim.claim_name, "readOnly": True}
        volumes.append({"name": name, "persistentVolumeClaim": claim})
    if checkpoint.host_path is not None:
        volumes.append({"hostPath": {"path": checkpoint.host_path.path, "type": "Directory"}, "name": name})
    return volumes


def _mounts(checkpoint: CheckpointSpec) -> list[Manifest]:
    mounts: list[Manifest] = [
        {"mountPath": names.TOKEN_DIRECTORY, "name": f"{naming.VOLUME_PREFIX}token", "readOnly": True},
        {"mountPath": "/tmp", "name": f"{naming.VOLUME_PREFIX}tmp"},  # noqa: S108
    ]
    if checkpoint.uri is None:
        mount: Manifest = {"mountPath": CHECKPOINT_PATH, "name": f"{naming.VOLUME_PREFIX}checkpoint", "readOnly": True}
        if checkpoint.persistent_volume_claim is not None and checkpoint.persistent_volume_claim.path:
            mount["subPath"] = checkpoint.persistent_volume_claim.path
        mounts.append(mount)
    return mounts
