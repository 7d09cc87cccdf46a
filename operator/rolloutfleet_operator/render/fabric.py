"""What a fabric adds to engine pods, and the ComputeDomain that Multi-Node NVLink needs."""

from typing import Any, Final

from rolloutfleet_operator import naming
from rolloutfleet_operator.api.fabric import FabricPreset, FabricSpec
from rolloutfleet_operator.render.identity import FleetIdentity, Manifest

CLAIM: Final = f"{naming.VOLUME_PREFIX}fabric"
"""The claim's name inside a pod."""
_INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")


def fabric_environment(fabric: FabricSpec) -> dict[str, str]:
    """Defaults that a user's own variables replace.

    NCCL finds adapters, RoCE's address index and NVLink between nodes by itself, so nothing is set of which the trainer would need to
    have the same.
    """
    variables = dict.fromkeys(_INTERFACE_VARIABLES, fabric.interface) if fabric.interface else {}
    if fabric.preset is FabricPreset.EFA:
        variables["FI_PROVIDER"] = "efa"
    return {name: value for name, value in sorted(variables.items()) if value}


def fabric_limits(fabric: FabricSpec) -> dict[str, str]:
    """Extended resources of the engine container."""
    return {fabric.rdma: str(fabric.rdma_devices)} if fabric.rdma else {}


def fabric_capabilities(fabric: FabricSpec) -> list[str]:
    """What a container may do beyond the usual nothing: adapters read and write memory that is locked."""
    return ["IPC_LOCK"] if fabric.preset.remote_memory else []


def fabric_pod(fleet: FleetIdentity, fabric: FabricSpec) -> dict[str, Any]:
    """Fields of the pod."""
    fields: dict[str, Any] = {}
    if fabric.host_network:
        # Without the policy a pod in the host's network would ask the host's resolver for the fleet's own names.
        fields |= {"dnsPolicy": "ClusterFirstWithHostNet", "hostNetwork": True}
    if template := claim_template(fleet, fabric):
        fields["resourceClaims"] = [{"name": CLAIM, "resourceClaimTemplateName": template}]
    return fields


def fabric_claims(fabric: FabricSpec) -> list[Manifest]:
    """The claims of the pod that the engine container uses."""
    return [{"name": CLAIM}] if fabric.preset is FabricPreset.MULTI_NODE_NVLINK else []


def claim_template(fleet: FleetIdentity, fabric: FabricSpec) -> str:
    """The ResourceClaimTemplate of each pod's channel; empty where none is needed."""
    if fabric.preset is not FabricPreset.MULTI_NODE_NVLINK:
        return ""
    return fabric.claim_template or naming.compute_domain_name(fleet.name)


def render_compute_domain(fleet: FleetIdentity, fabric: FabricSpec) -> Manifest | None:
    """The fleet's ComputeDomain, whose controller makes the template; None where the fleet has none of its own.

    ``numNodes`` 0 lets each pod start as soon as its own node has joined, as many as there will be:
    https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu
    """
    if fabric.preset is not FabricPreset.MULTI_NODE_NVLINK or fabric.claim_template:
        return None
    name = naming.compute_domain_name(fleet.name)
    return {
        "apiVersion": f"{naming.COMPUTE_DOMAIN_GROUP}/v1beta1",
        "kind": naming.COMPUTE_DOMAIN_KIND,
        "metadata": fleet.metadata(name, naming.ROLE_LEADER),
        "spec": {"channel": {"resourceClaimTemplate": {"name": name}}, "numNodes": 0},
    }
