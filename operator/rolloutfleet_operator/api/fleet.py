"""``RolloutFleet``: what a user asks of a fleet."""

from typing import Self

from pydantic import Field, model_validator

from rolloutfleet.contract.policy import RefitPolicy, RollingPolicy
from rolloutfleet_operator.api.arguments import (
    argument_faults,
    environment_faults,
)
from rolloutfleet_operator.api.base import ApiModel, cel
from rolloutfleet_operator.api.engine import (
    PARALLELISM_VALIDATIONS,
    EngineSpec,
    ParallelismSpec,
    parallelism_faults,
)
from rolloutfleet_operator.api.fabric import FABRIC_VALIDATIONS, FabricSpec, fabric_faults
from rolloutfleet_operator.api.model import ModelSpec
from rolloutfleet_operator.api.placement import PlacementSpec
from rolloutfleet_operator.api.recovery import RecoverySpec
from rolloutfleet_operator.api.refit import RefitSpec
from rolloutfleet_operator.api.template import TemplateSpec
from rolloutfleet_operator.api.weights import CHECKPOINT_ABOVE_COMMITTED, WeightsSpec


class RolloutFleetSpec(ApiModel):
    """What the fleet should be."""

    replicas: int = Field(default=1, ge=0, le=1000, description="replicas is the number of engines.")
    model: ModelSpec = Field(description="model is what the engines serve.")
    parallelism: ParallelismSpec = Field(
        default_factory=ParallelismSpec, description="parallelism says how one engine is spread over devices."
    )
    engine: EngineSpec = Field(default_factory=EngineSpec, description="engine says how vLLM runs in each pod.")
    placement: PlacementSpec = Field(
        default_factory=PlacementSpec, description="placement says what engines need of a node."
    )
    fabric: FabricSpec = Field(
        default_factory=FabricSpec,
        description="fabric says what carries data between GPUs of different nodes.",
    )
    template: TemplateSpec = Field(default_factory=TemplateSpec, description="template is what else engine pods carry.")
    refit: RefitSpec = Field(default_factory=RefitSpec, description="refit says how new weights reach the engines.")
    recovery: RecoverySpec = Field(
        default_factory=RecoverySpec,
        description="recovery says what becomes of engines and nodes that keep failing, or are about to go.",
    )
    weights: WeightsSpec = Field(
        default_factory=WeightsSpec, description="weights say which checkpoint the engines are to serve, if any."
    )
    suspend: bool = Field(
        default=False,
        description="suspend removes the engines and the sync job; versions, Services and the token stay.",
    )

    @model_validator(mode="after")
    def _nothing_that_contradicts(self) -> Self:
        faults = argument_faults(self.engine.args) + environment_faults(each.name for each in self.engine.env)
        faults += parallelism_faults(self.parallelism) + fabric_faults(self.fabric)
        if self.engine.lora is not None and self.parallelism.pods > 1:
            faults.append(f"engine.lora needs engines of one pod, and parallelism gives each {self.parallelism.pods}")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def engines(self) -> int:
        """Engines that should exist now."""
        return 0 if self.suspend else self.replicas

    @property
    def world_size(self) -> int:
        """Ranks of the whole fleet, the trainer not counted: a multiple of an engine's by construction."""
        return self.replicas * self.parallelism.world

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        return self.model.served_name or self.model.name

    @property
    def refit_policy(self) -> RefitPolicy:
        """The policy as the sync job receives it."""
        return RefitPolicy(
            transport=self.refit.transport,
            staging=self.refit.staging,
            pause=self.refit.pause,
            cache=self.refit.cache,
            min_ready=self.refit.min_ready,
            on_failure=self.refit.on_failure,
            strategy=self.refit.strategy,
            rolling=self.refit.rolling or RollingPolicy(),
            verify=self.refit.verify,
            late_join=self.refit.late_join,
            deadlines=self.refit.deadlines,
        )


FLEET_VALIDATIONS = [
    cel(
        "self.metadata.name.size() <= 40",
        "metadata.name has at most 40 characters, so that names of pods stay valid",
        expression="'metadata.name ' + self.metadata.name + ' is longer than 40 characters, and names of pods hold it'",
    ),
    cel(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name begins with a letter and holds lower-case letters, digits and dashes alone, since Services are named after it",
    ),
    CHECKPOINT_ABOVE_COMMITTED,
]
"""Rules on the whole object."""


def _gpu_counted_once(field: str) -> dict[str, str]:
    amounts, resource = f"self.engine.resources.{field}", "self.placement.gpuResource"
    return cel(
        f"{resource} == '' || !has({amounts}) || !({resource} in {amounts})",
        f"engine.resources.{field} must not hold placement.gpuResource",
        expression=f"'engine.resources.{field} holds ' + {resource} + "
        f"', which parallelism counts already; remove it from the {field}'",
    )


SPEC_VALIDATIONS = [
    cel(
        "self.refit.transport != 'Native' || self.placement.gpuResource != ''",
        "refit.transport Native needs GPUs, and placement.gpuResource is empty: set Auto or Gloo, or name the GPU resource",
    ),
    cel(
        "self.refit.transport != 'Gloo' || self.placement.gpuResource == ''",
        "refit.transport Gloo is for engines on CPUs, and placement.gpuResource names GPUs: set Auto or Native, or empty it",
    ),
    *FABRIC_VALIDATIONS,
    cel(
        "self.fabric.preset == 'None' || self.placement.gpuResource != ''",
        "fabric.preset needs GPUs, and placement.gpuResource is empty",
        expression="'fabric.preset is ' + self.fabric.preset + ' but placement.gpuResource is empty; set it to None, or name the GPUs'",
    ),
    cel(
        "self.replicas == 0 || self.refit.minReady <= self.replicas",
        "refit.minReady must not be above replicas",
        expression="'refit.minReady %d is above replicas %d; no refit could ever begin'"
        ".format([self.refit.minReady, self.replicas])",
    ),
    cel(
        "!has(self.refit.rolling) || self.refit.strategy == 'Rolling'",
        "refit.rolling needs refit.strategy Rolling",
        expression="'refit.rolling is set but refit.strategy is ' + self.refit.strategy + '; set it to Rolling, or remove refit.rolling'",
    ),
    cel(
        "!has(self.refit.rolling) || self.replicas == 0 || self.refit.rolling.maxUnavailable <= self.replicas",
        "refit.rolling.maxUnavailable must not be above replicas",
        expression="'refit.rolling.maxUnavailable %d is above replicas %d; a roll takes at most all engines at a time'"
        ".format([self.refit.rolling.maxUnavailable, self.replicas])",
    ),
    cel(
        "self.refit.lateJoin != 'Checkpoint' || has(self.weights.checkpoint)",
        "refit.lateJoin Checkpoint needs weights.checkpoint",
    ),
    cel(
        "self.refit.lateJoin != 'Wait' || self.refit.strategy != 'Rolling'",
        "refit.strategy Rolling has engines take versions over from peers, which refit.lateJoin Wait forbids; set it to Peer",
    ),
    cel(
        "!has(self.model.revision) || !has(self.model.source) || has(self.model.source.hub)",
        "model.revision needs model.source.hub",
        expression="'model.revision is ' + self.model.revision + ' but model.source is not the hub; remove one of them'",
    ),
    _gpu_counted_once("limits"),
    _gpu_counted_once("requests"),
    *PARALLELISM_VALIDATIONS,
    cel(
        "!has(self.template.volumeMounts) || self.template.volumeMounts.all(mount, has(self.template.volumes) "
        "&& self.template.volumes.exists(volume, volume.name == mount.name))",
        "template.volumeMounts names a volume that template.volumes does not hold",
    ),
]
"""Rules across fields of the spec."""
