"""The control surface of one engine pod: what its launcher answers to the sync job.

Routes, all below ``/rolloutfleet/v1/worker``, all with the fleet's bearer token:

=========  ==================  ==========================================================================
GET        ``(root)``          :class:`WorkerReport`
POST       ``admit``           :class:`Admit` -> :class:`WorkerReport`
POST       ``check``           :class:`Check` -> :class:`CheckReport`
POST       ``join``            :class:`Join` -> :class:`JoinReport` (returns when every local rank is in the group)
POST       ``pause``           :class:`Pause` -> :class:`WorkerReport`
POST       ``receive``         :class:`Receive` -> :class:`ReceiveReport` (returns when all is loaded)
POST       ``commit``          :class:`Commit` -> :class:`CommitReport`
POST       ``resume``          :class:`Resume` -> :class:`WorkerReport`
POST       ``abort``           :class:`Abort` -> :class:`WorkerReport`
POST       ``reset-cache``     :class:`ResetCache` -> :class:`CacheReport`
=========  ==================  ==========================================================================

Every call names the fleet, the pod, the launcher's instance and an epoch. A call for another fleet, pod or instance, or of an older
epoch than the worker has seen, is refused and changes nothing. ``admit``, ``abort``, ``commit`` and ``resume`` are idempotent. Without a
token: ``GET /healthz/live``, ``/healthz/ready`` and ``/healthz/started``.
"""

from enum import StrEnum
from ipaddress import ip_address

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_camel

from rolloutfleet.contract.manifest import Manifest, ManifestFaults
from rolloutfleet.contract.names import CONTRACT_VERSION
from rolloutfleet.contract.policy import CachePolicy, PauseMode, Transport


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class WorkerState(StrEnum):
    """Where an engine stands in a refit."""

    STARTING = "Starting"
    """vLLM is not up yet."""
    SERVING = "Serving"
    """Holds one whole version and generates."""
    PAUSED = "Paused"
    """Holds one whole version, generates nothing until resumed."""
    RECEIVING = "Receiving"
    """Holds part of a version: dirty."""
    RECEIVED = "Received"
    """Holds a whole version that is not committed yet."""
    DIRTY = "Dirty"
    """A transfer ended half way; refuses generation until a refit has completed."""
    FAILED = "Failed"
    """vLLM ended or does not answer."""


class Rendezvous(_Message):
    """Where the members of a group meet: a key-value store that the trainer serves on a socket it has held open since it chose the port."""

    host: str
    """An IP address: the workers' resolver may know no name that the trainer's does."""
    port: int = Field(ge=1, le=65535)

    @field_validator("host")
    @classmethod
    def _reachable_address(cls, host: str) -> str:
        try:
            address = ip_address(host)
        except ValueError as error:
            raise ValueError(
                f"host {host!r} is not an IP address; give the one at which workers reach the trainer"
            ) from error
        if address.is_unspecified or address.is_multicast:
            raise ValueError(
                f"host {host} is no address of one machine; give the one at which workers reach the trainer"
            )
        return host


class Call(_Message):
    """What every control call carries; the worker refuses it unless it is meant for this pod and not out of date."""

    fleet_uid: str
    pod_uid: str
    instance: str = Field(min_length=1)
    """The launcher's :attr:`WorkerReport.instance`: a container restarted in place has forgotten its epoch, and must not obey old calls."""
    epoch: int = Field(ge=0)


class Admit(Call):
    """Tells the worker which version the fleet has committed; it is Ready only while it holds that one."""

    version: int = Field(ge=0)


class Check(Call):
    """Asks whether the engine's model can load a manifest, without touching its weights."""

    manifest: Manifest
    deadline_seconds: float = Field(gt=0)


class Join(Call):
    """Asks every local rank to join the group as ``rank_offset + local rank``."""

    transport: Transport
    rendezvous: Rendezvous
    rank_offset: int = Field(ge=0)
    world_size: int = Field(ge=2)
    deadline_seconds: float = Field(gt=0)


class Pause(Call):
    """Stops generation until resumed; the worker ends a pause that outlasts the deadline by itself."""

    mode: PauseMode
    deadline_seconds: float = Field(gt=0)


class Receive(Call):
    """Asks every local rank to receive and load the manifest's tensors from rank 0, in manifest order."""

    version: int = Field(ge=1)
    manifest: Manifest
    deadline_seconds: float = Field(gt=0)
    hold_seconds: float = Field(gt=0)
    """How long after the deadline the worker keeps a received version while it is verified and committed; then it is dirty."""


class Commit(Call):
    """Makes the received version the one that the worker holds, and treats the cache of the old one as the policy says."""

    version: int = Field(ge=1)
    cache: CachePolicy


class Resume(Call):
    """Lets a whole worker generate again."""


class Abort(Call):
    """Ends the epoch: leave the group, unblock collectives, resume when whole, stay fenced when dirty."""

    reason: str


class ResetCache(Call):
    """Empties the prefix cache."""


class WorkerReport(_Message):
    """What an engine pod says of itself: its line in the ledger."""

    contract_version: int = CONTRACT_VERSION
    fleet_uid: str
    pod_name: str
    pod_uid: str
    instance: str = Field(
        description="instance is new each time the launcher starts, so that a container restarted in place is seen."
    )
    engine: int
    ranks: int
    state: WorkerState
    epoch: int
    version: int = Field(description="version is the whole version held; meaningless while dirty.")
    version_in_flight: int = 0
    admitted: int | None = Field(
        default=None, description="admitted is the fleet version last told by admit or commit."
    )
    vllm_version: str = ""
    nccl_version: str = ""
    devices: tuple[str, ...] = ()
    """GPU UUIDs in rank order; ``cpu`` for engines on CPUs."""
    environment: dict[str, str] = Field(default_factory=dict)
    """The variables with a communication prefix, for comparison across members."""
    message: str = ""


class CheckReport(_Message):
    """Whether the engine's model can load a manifest."""

    faults: ManifestFaults
    ignored: tuple[str, ...] = ()
    """Tensors that vLLM's loader skips on purpose (tied or derived)."""


class JoinReport(_Message):
    """The pod is in the group."""

    ranks: tuple[int, ...]
    """The ranks that this pod's processes took, in local rank order."""


class ReceiveReport(_Message):
    """A version arrived and was loaded; what arrived, for comparison with what was sent."""

    version: int
    tensors: int
    nbytes: int
    received_digest: str
    """Digest of the bytes that arrived, equal to the sender's or the refit did not happen."""
    live_digests: tuple[str, ...]
    """Digest of each local rank's live parameters after loading, in rank order."""
    receive_seconds: float
    load_seconds: float


class CommitReport(_Message):
    """A version is the one that the worker holds."""

    version: int
    cache_reset: bool | None
    """True or False is vLLM's own answer; None means that the policy kept the cache."""


class CacheReport(_Message):
    """vLLM's own answer to a cache reset."""

    cache_reset: bool
