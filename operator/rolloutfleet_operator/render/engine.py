"""Engine pods: one template per revision, and the pods of each engine and incarnation of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rolloutfleet.contract import names
from rolloutfleet_operator import naming
from rolloutfleet_operator.api.fleet import RolloutFleetSpec
from rolloutfleet_operator.api.model import LoadFormat
from rolloutfleet_operator.config import Images
from rolloutfleet_operator.render.arguments import MODEL_PATH, render_arguments
from rolloutfleet_operator.render.fabric import (
    fabric_capabilities,
    fabric_claims,
    fabric_environment,
    fabric_limits,
    fabric_pod,
)
from rolloutfleet_operator.render.identity import FleetIdentity, Manifest
from rolloutfleet_operator.render.nodes import avoid_nodes, keep_apart, node_loss_tolerations
from rolloutfleet_operator.render.revision import revision_of
from rolloutfleet_operator.render.security import container_security, pod_security

CONTAINER = "engine"
STARTUP_PERIOD_SECONDS = 2
STARTUP_SECONDS = 3600
FIRST_PORT = 20_000
"""Of the windows of ports that the pods of engines take, below those that the kernel gives out by itself."""
PORTS_EACH = 32
ENGINE_PORTS = 2
"""At the window's beginning: where the engine's pods meet."""
ENGINE_LABELS = (naming.LABEL_FLEET, naming.LABEL_ENGINE, naming.LABEL_INCARNATION)
"""Equal on the pods of one engine, and on no other's."""
WINDOWS = (32_768 - FIRST_PORT) // PORTS_EACH
CACHE_FOLDER = "/tmp/vllm-cache"  # noqa: S108  a volume of the pod's own
"""vLLM compiles into one folder for each pod: two that share one disturb each other."""


@dataclass(frozen=True, slots=True)
class EngineTemplate:
    """What every engine pod of one revision has in common."""

    revision: str
    ranks: int
    """Of an engine."""
    pods: int
    """Of an engine."""
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: Manifest


def render_engine_template(fleet: FleetIdentity, spec: RolloutFleetSpec, images: Images) -> EngineTemplate:
    """The template of the fleet's engine pods; its revision changes with anything in it."""
    template = spec.template
    pod = {
        "automountServiceAccountToken": False,
        "containers": [_container(fleet, spec, images)],
        "enableServiceLinks": False,
        "restartPolicy": "Always",
        "securityContext": pod_security(),
        "subdomain": naming.engines_service_name(fleet.name),
        "terminationGracePeriodSeconds": template.termination_grace_period_seconds,
        "tolerations": [
            *(toleration.body() for toleration in template.tolerations),
            *node_loss_tolerations(template.tolerations, spec.recovery.node_loss_seconds),
        ],
        "volumes": _volumes(fleet, spec),
        **fabric_pod(fleet, spec.fabric),
        **_overlay(spec),
    }
    labels, annotations = dict(template.labels), dict(template.annotations)
    revision = revision_of({"spec": pod, "labels": labels, "annotations": annotations})
    return EngineTemplate(
        revision=revision,
        ranks=spec.parallelism.world,
        pods=spec.parallelism.pods,
        labels=labels,
        annotations=annotations,
        spec=pod,
    )


def render_engine_pods(
    fleet: FleetIdentity, template: EngineTemplate, engine: int, incarnation: int, avoided: Iterable[str] = ()
) -> list[Manifest]:
    """The pods of one engine, the leader first."""
    return [
        render_engine_pod(fleet, template, engine, incarnation, avoided, pod_rank) for pod_rank in range(template.pods)
    ]


def render_engine_pod(
    fleet: FleetIdentity,
    template: EngineTemplate,
    engine: int,
    incarnation: int,
    avoided: Iterable[str] = (),
    pod_rank: int = 0,
) -> Manifest:
    """One engine pod: the template with its own name, labels, host name and numbers, kept off the nodes that are avoided."""
    name = naming.engine_pod_name(fleet.name, engine, pod_rank, incarnation)
    labels = {
        **template.labels,
        naming.LABEL_ENGINE: str(engine),
        naming.LABEL_INCARNATION: str(incarnation),
        naming.LABEL_RANK: str(pod_rank),
        naming.LABEL_REVISION: template.revision,
    }
    metadata = fleet.metadata(name, naming.ROLE_FOLLOWER if pod_rank else naming.ROLE_LEADER, labels)
    annotations = {**template.annotations, naming.ANNOTATION_RANKS: str(template.ranks)}
    if template.pods > 1:
        annotations[naming.ANNOTATION_PODS] = str(template.pods)
    metadata["annotations"] = dict(sorted(annotations.items()))
    container = template.spec["containers"][0]
    own = {names.ENV_ENGINE: str(engine)}
    if template.pods > 1:
        own |= _own_environment(fleet, template, engine, incarnation, pod_rank)
    given = {variable["name"] for variable in container["env"]}
    env = [
        *({"name": name, "value": value} for name, value in own.items() if name not in given),
        *container["env"],
    ]
    affinity = avoid_nodes(template.spec.get("affinity"), avoided)
    if template.pods > 1:
        # Each node holds equally many ranks of an engine: those of one of its pods.
        affinity = keep_apart(affinity, {key: metadata["labels"][key] for key in ENGINE_LABELS})
    spec = {**template.spec, "containers": [{**container, "env": env}], "hostname": name}
    if affinity:
        spec["affinity"] = affinity
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": spec,
    }


def _own_environment(
    fleet: FleetIdentity, template: EngineTemplate, engine: int, incarnation: int, pod_rank: int
) -> dict[str, str]:
    """What tells the pods of an engine apart, and keeps engines that share a host out of each other's way; users may replace the latter."""
    window = FIRST_PORT + (engine * template.pods + pod_rank) % WINDOWS * PORTS_EACH
    leaders = FIRST_PORT + engine * template.pods % WINDOWS * PORTS_EACH
    own = {
        names.ENV_ENGINE_PORT: str(leaders),
        names.ENV_POD_RANK: str(pod_rank),
        "VLLM_CACHE_ROOT": f"{CACHE_FOLDER}/{engine}-{pod_rank}",
        "VLLM_PORT": str(window + ENGINE_PORTS),
    }
    if pod_rank:
        leader = naming.engine_pod_name(fleet.name, engine, 0, incarnation)
        own[names.ENV_LEADER] = f"{leader}.{naming.engines_service_name(fleet.name)}.{fleet.namespace}.svc"
    return dict(sorted(own.items()))


def _container(fleet: FleetIdentity, spec: RolloutFleetSpec, images: Images) -> Manifest:
    return {
        "args": render_arguments(spec),
        "command": ["python3", "-m", "rolloutfleet_worker", "--"],
        "env": _environment(fleet, spec),
        "image": spec.engine.image or images.worker,
        "livenessProbe": _probe("live", periodSeconds=10, timeoutSeconds=5, failureThreshold=3),
        "name": CONTAINER,
        "ports": [
            {"containerPort": names.GENERATION_PORT, "name": "generation", "protocol": "TCP"},
            {"containerPort": names.WORKER_CONTROL_PORT, "name": "control", "protocol": "TCP"},
        ],
        "readinessProbe": _probe("ready", periodSeconds=1, timeoutSeconds=5, failureThreshold=1),
        "resources": _resources(spec),
        "securityContext": container_security(fabric_capabilities(spec.fabric)),
        "startupProbe": _probe(
            "started",
            periodSeconds=STARTUP_PERIOD_SECONDS,
            timeoutSeconds=5,
            failureThreshold=STARTUP_SECONDS // STARTUP_PERIOD_SECONDS,
        ),
        "volumeMounts": _mounts(spec),
    }


def _probe(answer: str, **timing: int) -> Manifest:
    return {"httpGet": {"path": f"/healthz/{answer}", "port": "control"}, **timing}


def _environment(fleet: FleetIdentity, spec: RolloutFleetSpec) -> list[Manifest]:
    """The operator's variables, then the user's; a user may replace those that are not ROLLOUTFLEET_."""
    fixed = {
        names.ENV_FLEET: fleet.name,
        names.ENV_FLEET_UID: fleet.uid,
        names.ENV_NAMESPACE: fleet.namespace,
        names.ENV_RANKS: str(spec.parallelism.world),
        **({names.ENV_PODS: str(spec.parallelism.pods)} if spec.parallelism.pods > 1 else {}),
        names.ENV_MODEL: spec.served_name,
        names.ENV_TOKEN_FILE: names.TOKEN_FILE,
        names.ENV_GRACE_SECONDS: str(spec.template.termination_grace_period_seconds),
        names.ENV_AWAIT_FIRST_REFIT: "true" if spec.model.load_format is LoadFormat.DUMMY else "false",
    }
    from_pod = {
        names.ENV_POD_NAME: "metadata.name",
        names.ENV_POD_UID: "metadata.uid",
        names.ENV_POD_IP: "status.podIP",
    }
    defaults = {"HOME": "/tmp", "USER": "rolloutfleet"}  # noqa: S108  a volume of the pod's own
    if spec.placement.gpu_resource:
        # Without it the communicator between trainer and engines may fail to set up peer access; it must be equal on both sides.
        defaults["NCCL_CUMEM_ENABLE"] = "1"
        if spec.parallelism.pods > 1:
            # NVLink's in-network reductions fail in groups that span hosts.
            defaults["NCCL_NVLS_ENABLE"] = "0"
    if spec.parallelism.data > 1:
        defaults["VLLM_DP_SIZE"] = str(spec.parallelism.data)
    if spec.fabric.preset.remote_memory:
        fixed[names.ENV_FABRIC] = spec.fabric.preset.value
    defaults |= fabric_environment(spec.fabric)
    chosen = {variable.name for variable in spec.engine.env}
    return [
        *({"name": name, "value": value} for name, value in fixed.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in from_pod.items()),
        *({"name": name, "value": value} for name, value in defaults.items() if name not in chosen),
        *(variable.body() for variable in spec.engine.env),
    ]


def _resources(spec: RolloutFleetSpec) -> Manifest:
    resources: Manifest = {
        key: dict(sorted(amounts.items())) for key, amounts in spec.engine.resources.body().items() if amounts
    }
    if gpu := spec.placement.gpu_resource:
        resources["limits"] = resources.get("limits", {}) | {gpu: str(spec.parallelism.ranks_per_pod)}
    if limits := fabric_limits(spec.fabric):
        resources["limits"] = resources.get("limits", {}) | limits
    if claims := fabric_claims(spec.fabric):
        resources["claims"] = claims
    return resources


def _volumes(fleet: FleetIdentity, spec: RolloutFleetSpec) -> list[Manifest]:
    mounted = {mount.mount_path for mount in spec.template.volume_mounts}
    volumes: list[Manifest] = [
        {
            "name": f"{naming.VOLUME_PREFIX}token",
            "secret": {"defaultMode": 0o440, "secretName": naming.token_name(fleet.name)},
        }
    ]
    volumes += [_volume for path, _volume in _scratch(spec).items() if path not in mounted]
    source = spec.model.source
    if source is not None and source.persistent_volume_claim is not None:
        claim = {"claimName": source.persistent_volume_claim.claim_name, "readOnly": True}
        volumes.append({"name": f"{naming.VOLUME_PREFIX}model", "persistentVolumeClaim": claim})
    if source is not None and source.host_path is not None:
        host = {"path": source.host_path.path, "type": "Directory"}
        volumes.append({"hostPath": host, "name": f"{naming.VOLUME_PREFIX}model"})
    return [*volumes, *(volume.body() for volume in spec.template.volumes)]


def _scratch(spec: RolloutFleetSpec) -> dict[str, Manifest]:
    """Path -> volume that the operator gives unless the user mounts something there."""
    volumes: dict[str, Manifest] = {"/tmp": {"emptyDir": {}, "name": f"{naming.VOLUME_PREFIX}tmp"}}  # noqa: S108
    if not spec.template.host_ipc:
        # The host's comes with its IPC namespace, and a trainer looks for the engines there.
        bound = {"sizeLimit": str(spec.fabric.shared_memory)} if spec.fabric.shared_memory is not None else {}
        memory = {"emptyDir": {"medium": "Memory", **bound}, "name": f"{naming.VOLUME_PREFIX}shm"}
        volumes["/dev/shm"] = memory  # noqa: S108
    return dict(sorted(volumes.items()))


def _mounts(spec: RolloutFleetSpec) -> list[Manifest]:
    mounted = {mount.mount_path for mount in spec.template.volume_mounts}
    mounts: list[Manifest] = [
        {"mountPath": names.TOKEN_DIRECTORY, "name": f"{naming.VOLUME_PREFIX}token", "readOnly": True}
    ]
    mounts += [{"mountPath": path, "name": v["name"]} for path, v in _scratch(spec).items() if path not in mounted]
    source = spec.model.source
    if source is not None and source.local:
        model: Manifest = {"mountPath": MODEL_PATH, "name": f"{naming.VOLUME_PREFIX}model", "readOnly": True}
        if source.persistent_volume_claim is not None and source.persistent_volume_claim.path:
            model["subPath"] = source.persistent_volume_claim.path
        mounts.append(model)
    return [*mounts, *(mount.body() for mount in spec.template.volume_mounts)]


def _overlay(spec: RolloutFleetSpec) -> dict[str, Any]:
    """The fields of the template that go into the pod as they are, without those that are empty."""
    template = spec.template
    fields = {
        "affinity": template.affinity,
        "hostIPC": template.host_ipc,
        "imagePullSecrets": [secret.body() for secret in template.image_pull_secrets],
        "nodeSelector": dict(sorted(template.node_selector.items())),
        "priorityClassName": template.priority_class_name,
        "runtimeClassName": template.runtime_class_name,
        "serviceAccountName": template.service_account_name,
    }
    return {name: value for name, value in fields.items() if value}
