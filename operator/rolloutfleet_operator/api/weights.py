"""``spec.weights``: a checkpoint that the fleet is to serve."""

from typing import Final

from pydantic import Field

from rolloutfleet_operator.api.base import ApiModel, cel, schema
from rolloutfleet_operator.api.model import ClaimSource, HostPathSource
from rolloutfleet_operator.api.podparts import LocalReference, Resources

MAX_VERSION: Final = 2147483647

_SOURCES: Final = ("uri", "persistentVolumeClaim", "hostPath")
_ONE_SOURCE: Final = " + ".join(f"(has(self.{name}) ? 1 : 0)" for name in _SOURCES)
_NAMED_SOURCES: Final = " + ".join(f"(has(self.{name}) ? ' {name}' : '')" for name in _SOURCES)
_SAME_SOURCE: Final = " && ".join(
    f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})"
    for name in _SOURCES
)


class CheckpointSpec(ApiModel):
    """A checkpoint in safetensors format, as one weight version."""

    version: int = Field(
        ge=1,
        le=MAX_VERSION,
        description="version is the weight version that the checkpoint becomes. It only rises, and what it names does not change: "
        "another checkpoint needs a higher one, and so does going back to an older checkpoint.",
    )
    uri: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        pattern="^[a-z][a-z0-9+.-]*://.+$",
        description="uri is where the checkpoint is, for fsspec: s3://, gs://, https:// and others. The engine's image holds the driver.",
        json_schema_extra=schema(
            validations=[
                cel(
                    "!self.startsWith('file://')",
                    "weights.checkpoint.uri cannot be a file of the pod's image; use persistentVolumeClaim or hostPath",
                )
            ]
        ),
    )
    persistent_volume_claim: ClaimSource | None = Field(
        default=None, description="persistentVolumeClaim holds the checkpoint in a volume of the fleet's namespace."
    )
    host_path: HostPathSource | None = Field(
        default=None, description="hostPath holds the checkpoint in a folder that every node has."
    )
    secret_ref: LocalReference | None = Field(
        default=None,
        description="secretRef names a Secret whose keys become environment variables of the Job, such as an object store's credentials.",
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="resources are those of the Job's container; it asks for half a CPU and 1Gi of memory unless they say otherwise.",
    )


class WeightsSpec(ApiModel):
    """Weights that the fleet is to serve, besides those that trainers send."""

    checkpoint: CheckpointSpec | None = Field(
        default=None,
        description="checkpoint is given to every engine as its version, by a Job that acts as trainer, when that version is above the "
        "committed one. No engine restarts. It waits while a trainer holds the fleet.",
        json_schema_extra=schema(
            validations=[
                cel(
                    f"{_ONE_SOURCE} == 1",
                    "weights.checkpoint needs exactly one of uri, persistentVolumeClaim and hostPath",
                    expression="'weights.checkpoint needs exactly one of uri, persistentVolumeClaim and hostPath; given:' + "
                    f"{_NAMED_SOURCES}",
                ),
                cel(
                    f"self.version > oldSelf.version || (self.version == oldSelf.version && {_SAME_SOURCE})",
                    "weights.checkpoint.version only rises, and another checkpoint needs a higher one",
                    expression="'weights.checkpoint.version %d is not above %d: versions only rise, and another checkpoint, be it an older "
                    "one, needs a higher version'.format([self.version, oldSelf.version])",
                ),
            ]
        ),
    )


CHECKPOINT_ABOVE_COMMITTED: Final = cel(
    "!has(self.spec.weights.checkpoint) || (has(oldSelf.spec.weights.checkpoint) "
    "&& oldSelf.spec.weights.checkpoint.version == self.spec.weights.checkpoint.version) "
    "|| !has(self.status) || !has(self.status.weights) || !has(self.status.weights.version) "
    "|| self.spec.weights.checkpoint.version > self.status.weights.version",
    "weights.checkpoint.version must be above the fleet's committed version",
    expression="'weights.checkpoint.version %d is not above %d, the version that the fleet has committed'"
    ".format([self.spec.weights.checkpoint.version, self.status.weights.version])",
)
"""A rule on the whole object: a version that the fleet is past would never be sent."""
