"""``spec.model``: what the engines serve, and where its files come from."""

from enum import StrEnum

from pydantic import Field

from rolloutfleet_operator.api.base import ApiModel, cel, schema


class LoadFormat(StrEnum):
    """What the engines hold before the first refit."""

    AUTO = "Auto"
    """The model's own weights: version 0 serves."""
    DUMMY = "Dummy"
    """Random weights: nothing serves before the first refit."""


class Dtype(StrEnum):
    """Number format of the engines' weights."""

    AUTO = "Auto"
    BFLOAT16 = "BFloat16"
    FLOAT16 = "Float16"
    FLOAT32 = "Float32"


class HubSource(ApiModel):
    """The model hub that vLLM downloads from."""


class ClaimSource(ApiModel):
    """A volume claim that holds the model."""

    claim_name: str = Field(min_length=1, max_length=253, description="claimName is the PersistentVolumeClaim's name.")
    path: str | None = Field(
        default=None,
        max_length=1024,
        pattern="^[^/].*$",
        description="path is the model's folder inside the volume, relative to its root; the root itself unless set.",
    )


class HostPathSource(ApiModel):
    """A folder of every node that holds the model."""

    path: str = Field(
        max_length=1024, pattern="^/.*$", description="path is the absolute path of the model's folder on the nodes."
    )


class ModelSource(ApiModel):
    """Where the model's files come from: exactly one of the fields."""

    hub: HubSource | None = Field(default=None, description="hub downloads the model by its name.")
    persistent_volume_claim: ClaimSource | None = Field(
        default=None, description="persistentVolumeClaim reads the model from a claim of the fleet's namespace."
    )
    host_path: HostPathSource | None = Field(
        default=None, description="hostPath reads the model from a folder that every node has."
    )

    @property
    def local(self) -> bool:
        """Whether the model's files are mounted into the pod."""
        return self.persistent_volume_claim is not None or self.host_path is not None


_SOURCES = ("hub", "persistentVolumeClaim", "hostPath")


_ONE_SOURCE = " + ".join(f"(has(self.{name}) ? 1 : 0)" for name in _SOURCES)


_NAMED_SOURCES = " + ".join(f"(has(self.{name}) ? ' {name}' : '')" for name in _SOURCES)


class ModelSpec(ApiModel):
    """The model that the engines serve."""

    name: str = Field(
        min_length=1,
        max_length=256,
        description="name is the model's name: its id on the hub, and what it is served as unless servedName is set. "
        "It cannot change.",
        json_schema_extra=schema(
            validations=[
                cel(
                    "self == oldSelf",
                    "model.name cannot change",
                    expression="'model.name cannot change from ' + oldSelf + ' to ' + self + '; make a new fleet for another model'",
                )
            ]
        ),
    )
    revision: str | None = Field(
        default=None, min_length=1, max_length=256, description="revision is the branch, tag or commit on the hub."
    )
    source: ModelSource | None = Field(
        default=None,
        description="source says where the model's files come from: exactly one of hub, persistentVolumeClaim and "
        "hostPath; the hub unless set.",
        json_schema_extra=schema(
            validations=[
                cel(
                    f"{_ONE_SOURCE} == 1",
                    "model.source needs exactly one of hub, persistentVolumeClaim and hostPath",
                    expression=f"'model.source needs exactly one of hub, persistentVolumeClaim and hostPath; given:' + {_NAMED_SOURCES}",
                )
            ]
        ),
    )
    load_format: LoadFormat = Field(
        default=LoadFormat.AUTO,
        description="loadFormat is Auto to load the model's weights, or Dummy to start with random ones and serve after the first refit.",
    )
    served_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="servedName is the model's name in requests, name unless set.",
    )
    max_model_length: int | None = Field(
        default=None,
        ge=1,
        le=2147483647,
        description="maxModelLength bounds prompt and output of a request, in tokens.",
    )
    dtype: Dtype = Field(default=Dtype.AUTO, description="dtype is the number format of the engines' weights.")
