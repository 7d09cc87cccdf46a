"""``spec.fabric``: what carries data between GPUs of different nodes, and what engine pods need to use it."""

from enum import StrEnum
from typing import Final

from pydantic import Field

from rolloutfleet_operator.api.base import ApiModel, Quantity, cel

EFA_RESOURCE: Final = "vpc.amazonaws.com/efa"


class FabricPreset(StrEnum):
    """The fabric's kind."""

    NONE = "None"
    INFINIBAND = "InfiniBand"
    ROCE = "RoCE"
    EFA = "EFA"
    MULTI_NODE_NVLINK = "MultiNodeNVLink"

    @property
    def remote_memory(self) -> bool:
        """Whether it reads and writes remote memory through devices of a node, for which processes lock their pages."""
        return self in {FabricPreset.INFINIBAND, FabricPreset.ROCE, FabricPreset.EFA}


class FabricSpec(ApiModel):
    """What carries data between GPUs of different nodes, and what engine pods need to use it."""

    preset: FabricPreset = Field(
        default=FabricPreset.NONE,
        description="preset is the fabric's kind: InfiniBand, RoCE and EFA give each engine pod devices of rdmaResource and the right to "
        "lock memory, MultiNodeNVLink a channel of a ComputeDomain; None gives nothing.",
    )
    rdma_resource: str | None = Field(
        default=None,
        min_length=3,
        max_length=316,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        description="rdmaResource is the extended resource by which nodes offer RDMA devices, such as rdma/rdma_shared_device_a; "
        f"{EFA_RESOURCE} for EFA unless set.",
    )
    rdma_devices: int = Field(
        default=1, ge=1, le=64, description="rdmaDevices is how many of rdmaResource each engine pod gets."
    )
    claim_template: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="claimTemplate is the ResourceClaimTemplate by which engine pods get a channel of a ComputeDomain that exists; unset, "
        "MultiNodeNVLink makes a ComputeDomain for the fleet.",
    )
    interface: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        pattern=r"^[\^=]?[A-Za-z0-9._-]+(,[A-Za-z0-9._-]+)*$",
        description="interface names the network interfaces over which engines find each other and the trainer, as "
        "NCCL_SOCKET_IFNAME takes them; the one with the pod's own address unless set.",
    )
    shared_memory: Quantity | None = Field(
        default=None,
        description="sharedMemory bounds /dev/shm of each engine pod, such as 64Gi; unset, the pod's memory limit does.",
    )
    host_network: bool = Field(
        default=False,
        description="hostNetwork puts engines into their node's network: one engine pod a node, for their ports are the node's. The Pod "
        "Security Standards allow it in privileged namespaces alone.",
    )

    @property
    def rdma(self) -> str:
        """The resource that counts RDMA devices; empty when the preset needs none."""
        if not self.preset.remote_memory:
            return ""
        return self.rdma_resource or (EFA_RESOURCE if self.preset is FabricPreset.EFA else "")


_NEEDS_RDMA = "self.fabric.preset in ['InfiniBand', 'RoCE', 'EFA']"
FABRIC_VALIDATIONS = [
    cel(
        "!(self.fabric.preset in ['InfiniBand', 'RoCE']) || has(self.fabric.rdmaResource)",
        "fabric.preset needs fabric.rdmaResource",
        expression="'fabric.preset ' + self.fabric.preset + ' needs fabric.rdmaResource: the extended resource by which nodes offer RDMA "
        "devices, such as rdma/rdma_shared_device_a'",
    ),
    cel(
        f"!has(self.fabric.rdmaResource) || {_NEEDS_RDMA}",
        "fabric.rdmaResource needs a preset that uses it",
        expression="'fabric.rdmaResource is ' + self.fabric.rdmaResource + ' but fabric.preset is ' + self.fabric.preset + "
        "', which uses no RDMA devices; set it to InfiniBand, RoCE or EFA, or remove the resource'",
    ),
    cel(
        "!has(self.fabric.claimTemplate) || self.fabric.preset == 'MultiNodeNVLink'",
        "fabric.claimTemplate needs fabric.preset MultiNodeNVLink",
        expression="'fabric.claimTemplate is ' + self.fabric.claimTemplate + ' but fabric.preset is ' + self.fabric.preset + "
        "'; set it to MultiNodeNVLink, or remove the template'",
    ),
]
"""Rules of the spec: those of a field that has a default are tried on the default as it is written, where fields are missing."""


def fabric_faults(fabric: FabricSpec) -> list[str]:
    """What the schema's rules say, for objects that were stored without them."""
    faults = []
    if fabric.preset.remote_memory and not fabric.rdma:
        faults.append(f"fabric.preset {fabric.preset} needs fabric.rdmaResource")
    if fabric.rdma_resource and not fabric.preset.remote_memory:
        faults.append(f"fabric.rdmaResource is {fabric.rdma_resource} but fabric.preset is {fabric.preset}")
    if fabric.claim_template and fabric.preset is not FabricPreset.MULTI_NODE_NVLINK:
        faults.append(f"fabric.claimTemplate is {fabric.claim_template} but fabric.preset is {fabric.preset}")
    return faults
