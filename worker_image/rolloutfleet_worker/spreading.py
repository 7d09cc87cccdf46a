"""An engine of several pods: what its launchers tell each other, and the arguments with which their vLLMs find one another.

Each follower's launcher holds a link to the leader's, from before vLLM starts until it ends, and one more for each of its ranks, so that
the leader commands all ranks of the engine. No vLLM starts before every pod is there, and all end when one of these links does: vLLM's
own rendezvous would otherwise wait for ever for a pod that has died, or let a new pod meet the remains of an old engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from pydantic import BaseModel, ConfigDict

from rolloutfleet.contract.names import API_PREFIX
from rolloutfleet.contract.worker import Locality
from rolloutfleet_worker.wire import Frame

LINK_ROUTE: Final = f"{API_PREFIX}/engine/pod"
RANK_ROUTE: Final = f"{API_PREFIX}/engine/rank"
HEADER_START: Final = "x-rolloutfleet-engine-start"
HEADER_POD_RANK: Final = "x-rolloutfleet-pod-rank"
HOST_ADDRESS: Final = "VLLM_HOST_IP"
"""vLLM's variable for the address under which the engine's other pods reach this one."""


class Hello(BaseModel):
    """What a follower says of itself; the leader takes it in when it is of the same engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fleet_uid: str
    engine: int
    pod_name: str
    pod_rank: int
    pods: int
    ranks: int
    arguments: str
    """Digest of those that vLLM gets on every pod."""
    environment: dict[str, str]
    locality: Locality


def digest_of(arguments: Sequence[str]) -> str:
    """Equal for equal arguments."""
    return sha256("\0".join(arguments).encode()).hexdigest()


def find_difference(mine: Hello, theirs: Hello) -> str:
    """Why the other pod is none of this engine's, or cannot work with it; empty when it can."""
    who = f"pod {theirs.pod_name}"
    for what, own, other in (
        ("is of the fleet with uid", mine.fleet_uid, theirs.fleet_uid),
        ("is of engine", mine.engine, theirs.engine),
        ("takes the engine to have pods:", mine.pods, theirs.pods),
        ("takes the engine to have ranks:", mine.ranks, theirs.ranks),
    ):
        if own != other:
            return f"{who} {what} {other}, and {mine.pod_name} {own}"
    if not 0 < theirs.pod_rank < mine.pods:
        return f"{who} has pod rank {theirs.pod_rank}, and followers of an engine of {mine.pods} pods have 1 to {mine.pods - 1}"
    if mine.arguments != theirs.arguments:
        return (
            f"{who} was given other arguments of vLLM than {mine.pod_name}: the pods of an engine are of one revision"
        )
    return _differing_variable(mine, theirs)


def _differing_variable(mine: Hello, theirs: Hello) -> str:
    for name in sorted(mine.environment.keys() | theirs.environment.keys()):
        own, other = (_given(hello.environment, name) for hello in (mine, theirs))
        if own != other:
            return f"{name} is {other} in pod {theirs.pod_name} and {own} in {mine.pod_name}; it must be equal in all pods of an engine"
    return ""


def _given(environment: Mapping[str, str], name: str) -> str:
    return repr(environment[name]) if name in environment else "not set"


def common_locality(localities: Sequence[Locality]) -> Locality:
    """Words that hold for all pods of an engine: those that they share."""

    def shared(words: set[str]) -> str:
        return words.pop() if len(words) == 1 else ""

    return Locality(
        host=shared({each.host for each in localities}), memory=shared({each.memory for each in localities})
    )


@dataclass(frozen=True, slots=True)
class Start:
    """The leader's order to start vLLM."""

    identity: str
    """New each time the leader starts: links of ranks that an earlier start has left are refused."""
    address: str
    port: int

    def frame(self) -> Frame:
        return {"start": {"identity": self.identity, "address": self.address, "port": self.port}}

    @classmethod
    def parse(cls, frame: Frame) -> "Start":
        start = frame["start"]
        return cls(identity=start["identity"], address=start["address"], port=start["port"])

    def arguments(self, pods: int, pod_rank: int) -> list[str]:
        """What vLLM is told in this pod besides what all pods are told. Data parallel ranks follow from the pod's."""
        return [
            "--distributed-executor-backend=mp",
            f"--nnodes={pods}",
            f"--node-rank={pod_rank}",
            f"--master-addr={self.address}",
            f"--master-port={self.port}",
            f"--data-parallel-address={self.address}",
            f"--data-parallel-rpc-port={self.port + 1}",
            *(["--headless"] if pod_rank else []),
        ]
