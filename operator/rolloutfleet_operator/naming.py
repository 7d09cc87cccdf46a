"""Every name that the operator gives: objects, labels, annotations, managers. Nothing else may spell one out."""

from typing import Final

from rolloutfleet.contract import revival
from rolloutfleet.contract.names import GROUP

VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
FLEET_KIND: Final = "RolloutFleet"
FLEET_PLURAL: Final = "rolloutfleets"
SYNC_KIND: Final = "WeightSync"
SYNC_PLURAL: Final = "weightsyncs"

FIELD_MANAGER: Final = "rolloutfleet-operator"
SYNC_FIELD_MANAGER: Final = "rolloutfleet-sync"
FINALIZER: Final = f"{GROUP}/operator"

LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_FLEET: Final = f"{GROUP}/fleet"
LABEL_ROLE: Final = f"{GROUP}/role"
LABEL_ENGINE: Final = f"{GROUP}/engine"
LABEL_RANK: Final = f"{GROUP}/rank"
"""Which of an engine's pods this is; 0 is its leader."""
LABEL_INCARNATION: Final = f"{GROUP}/incarnation"
LABEL_REVISION: Final = f"{GROUP}/revision"
LABEL_WEIGHTSYNC: Final = f"{GROUP}/weightsync"
ANNOTATION_RANKS: Final = f"{GROUP}/ranks"
"""Worker processes of an engine, kept on its pods because the fleet's own number may have changed since."""
ANNOTATION_PODS: Final = f"{GROUP}/pods"
"""Pods of an engine, kept likewise; one pod needs no such annotation."""

ANNOTATION_LEAVING: Final = f"{GROUP}/leaving"
"""On an engine pod, by whoever knows that it will be taken away: the reason."""
ANNOTATION_REVIVE: Final = revival.ANNOTATION
"""On a fleet: each new value gives its retired engines another chance, or those that it names."""

RESERVED_KEY_PREFIXES: Final = (f"{GROUP}/", "app.kubernetes.io/")
"""Label and annotation keys that a fleet's template may not set."""

NAME_VALUE: Final = "rolloutfleet"
MANAGED_BY_VALUE: Final = "rolloutfleet-operator"
MANAGED_SELECTOR: Final = f"{LABEL_MANAGED_BY}={MANAGED_BY_VALUE}"

ROLE_LEADER: Final = "leader"
"""An engine's first pod, which answers for all of it."""
ROLE_FOLLOWER: Final = "follower"
"""The further pods of an engine."""
ROLE_SYNC: Final = "sync"
ROLE_CHECKPOINT: Final = "checkpoint"
"""The Job that sends a checkpoint, its pods, and the WeightSync that tells of it."""
ROLE_SHARED: Final = "shared"
"""Objects of the fleet as a whole: Services, the token, the roster."""

MAX_FLEET_NAME: Final = 40
"""Leaves room below 63 for the longest suffix, that of a sync pod."""

VOLUME_PREFIX: Final = "rolloutfleet-"

COMPUTE_DOMAIN_GROUP: Final = "resource.nvidia.com"
COMPUTE_DOMAIN_KIND: Final = "ComputeDomain"


def token_name(fleet: str) -> str:
    """Name of the Secret that holds the fleet's bearer token."""
    return f"{fleet}-token"


def generation_service_name(fleet: str) -> str:
    """Name of the Service over the Ready engine leaders."""
    return fleet


def engines_service_name(fleet: str) -> str:
    """Name of the headless Service that gives every engine pod its DNS name."""
    return f"{fleet}-engines"


def members_name(fleet: str) -> str:
    """Name of the ConfigMap that holds the roster."""
    return f"{fleet}-members"


def sync_name(fleet: str) -> str:
    """Name shared by the sync job's Service, ServiceAccount, Role and RoleBinding."""
    return f"{fleet}-sync"


def sync_job_name(fleet: str, revision: str) -> str:
    """Name of the sync Job of one template revision."""
    return f"{fleet}-sync-{revision}"


def compute_domain_name(fleet: str) -> str:
    """Name of the fleet's ComputeDomain, and of the ResourceClaimTemplate that comes with it."""
    return f"{fleet}-fabric"


def standing_weightsync_name(fleet: str) -> str:
    """Name of the WeightSync that the operator makes for every fleet."""
    return fleet


def checkpoint_name(fleet: str, version: int) -> str:
    """Name of the WeightSync of a checkpoint, and of the Job that sends it."""
    return f"{fleet}-checkpoint-{version}"


def repair_name(fleet: str, version: int) -> str:
    """Name of the Job that sends a checkpoint again, to engines that lack it."""
    return f"{fleet}-repair-{version}"


def engine_pod_name(fleet: str, engine: int, rank: int, incarnation: int) -> str:
    """Name of one engine pod; ``rank`` counts the pods of an engine, 0 is its leader."""
    return f"{fleet}-{engine}-{rank}-{incarnation}"
