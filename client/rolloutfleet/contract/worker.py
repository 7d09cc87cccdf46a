"""The control surface of one engine pod: what its launcher answers to the sync job.

Routes, all below ``/rolloutfleet/v1/worker``, all with the fleet's bearer token:

=========  ==================  ==========================================================================
GET        ``(root)``          :class:`WorkerReport`
POST       ``admit``           :class:`Admit` -> :class:`WorkerReport`
POST       ``check``           :class:`Check` -> :class:`CheckReport`
POST       ``join``            :class:`Join` -> :class:`JoinReport` (returns when every local rank is in the group)
POST       ``prepare``         :class:`Prepare` -> :class:`PrepareReport` (returns when plans, tables and buffers are ready)
POST       ``pause``           :class:`Pause` -> :class:`WorkerReport`
POST       ``receive``         :class:`Receive` -> :class:`ReceiveReport` (returns when all is loaded, or staged)
POST       ``commit``          :class:`Commit` -> :class:`CommitReport`
POST       ``resume``          :class:`Resume` -> :class:`WorkerReport`
POST       ``abort``           :class:`Abort` -> :class:`WorkerReport`
POST       ``reset-cache``     :class:`ResetCache` -> :class:`CacheReport`
POST       ``sleep``           :class:`Sleep` -> :class:`WorkerReport`
POST       ``wake``            :class:`Wake` -> :class:`WorkerReport`
POST       ``lend``            :class:`Lend` -> :class:`LendReport` (offers this engine's weights to a peer, and goes on serving)
POST       ``let-go``          :class:`LetGo` -> :class:`WorkerReport` (ends a lending; epoch and group stay)
POST       ``borrow``          :class:`Borrow` -> :class:`ReceiveReport` (takes a peer's weights, kernel format and all)
=========  ==================  ==========================================================================

Every call names the fleet, the pod, the launcher's instance and an epoch. A call for another fleet, pod or instance, or of an older
epoch than the worker has seen, is refused and changes nothing. ``admit``, ``abort``, ``commit``, ``resume`` and ``let-go`` are idempotent.
Without a token: ``GET /healthz/live``, ``/healthz/ready`` and ``/healthz/started``.
"""

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from ipaddress import ip_address
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_camel

from rolloutfleet.contract.adapter import AdapterSpec, HeldAdapter
from rolloutfleet.contract.manifest import Manifest, ManifestFaults
from rolloutfleet.contract.names import CONTRACT_VERSION
from rolloutfleet.contract.policy import CachePolicy, PauseMode, Transport, Verify, Wire


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
    ASLEEP = "Asleep"
    """vLLM sleeps: weights or cache have left the device."""
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
    """Tells the worker which version the fleet has committed; it is Ready only while it holds that one, or while it may be stale."""

    version: int = Field(ge=0)
    stale_seconds: float | None = Field(default=None, gt=0)
    """How long the worker may serve what it holds although the fleet has committed, or is about to commit, a newer version. A worker
    that is told so repeatedly keeps the earliest end, and ends it by itself. None takes the permission back."""
    hold: str = Field(default="", max_length=2000)
    """Why a whole worker refuses requests all the same; empty lets it serve. A commit of a version ends it."""


class Check(Call):
    """Asks whether the engine's model can load a manifest, without touching its weights."""

    manifest: Manifest
    adapter: AdapterSpec | None = None
    """What the tensors are, where they are an adapter's. It is received staged, whatever the policy says, and its commit gives it to
    requests that name it; the base weights stay."""
    deadline_seconds: float = Field(gt=0)


class Join(Call):
    """Asks every local rank to join the group as ``rank_offset + local rank``; ranks below ``trainer_ranks`` are the trainer's."""

    transport: Transport
    """What the sync job has chosen; never Auto."""
    wire: Wire
    rendezvous: Rendezvous
    trainer_ranks: int = Field(ge=1)
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2)
    deadline_seconds: float = Field(gt=0)


class Prepare(Call):
    """Asks every local rank to make ready for receiving a manifest that it has checked, while the engine goes on serving.

    Each rank publishes its layout in the session's store, reads there what each trainer rank holds, derives the program that the
    trainer derives too, and lays out its tables and buffers.
    """

    manifest_digest: str
    """The key of what was checked, see :func:`rolloutfleet.contract.adapter.manifest_key`."""
    layouts: tuple[str, ...]
    """Digest of the layout of every worker rank of the group, in rank order."""
    staged: bool
    """Receive into a second buffer beside the live parameters."""
    deadline_seconds: float = Field(gt=0)


class Pause(Call):
    """Stops generation until resumed; the worker ends a pause that outlasts the deadline by itself.

    Where a version lies staged, the pause lasts as long as :attr:`Receive.hold_seconds` says: it is for that version's copy.
    """

    mode: PauseMode
    deadline_seconds: float = Field(gt=0)


class Receive(Call):
    """Asks every local rank to receive a version of a manifest that it has checked, and to load it unless it is to be staged.

    A staged version arrives while the engine serves, and lies beside the live parameters until it is committed; a failure leaves
    the engine as it was.
    """

    version: int = Field(ge=1)
    manifest_digest: str
    staged: bool = False
    verify: Verify = Verify.BYTES
    """Full has every rank load the version once more into a fresh model, and compare. Never with ``staged``."""
    deadline_seconds: float = Field(gt=0)
    hold_seconds: float = Field(gt=0)
    """How long after the deadline the worker keeps a received version while it is verified, paused for and committed; then it is dirty,
    or forgets what it has staged."""


class Commit(Call):
    """Makes the received version the one that the worker holds, and treats the cache of the old one as the policy says.

    A staged version is copied into the live parameters now. An engine that is not paused does that between two steps of the model,
    and serves the new version when it answers.
    """

    version: int = Field(ge=1)
    cache: CachePolicy


class Resume(Call):
    """Lets a whole worker generate again."""


class Abort(Call):
    """Ends the epoch: leave the group, unblock collectives, resume when whole, stay fenced when dirty."""

    reason: str


class ResetCache(Call):
    """Empties the prefix cache."""


class SleepLevel(IntEnum):
    """How deep vLLM sleeps."""

    OFFLOAD = 1
    """Weights move to the host's memory and come back as they were; the cache is dropped."""
    DISCARD = 2
    """Weights and cache are dropped: after waking the engine is dirty until it is refitted."""


class Sleep(Call):
    """Frees the device's memory; refused while a version is in flight."""

    level: SleepLevel
    deadline_seconds: float = Field(gt=0)


class WakeTag(StrEnum):
    """What comes back to the device."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class Wake(Call):
    """Takes the device's memory again: all of it, or what the tags name."""

    tags: tuple[WakeTag, ...] = ()
    deadline_seconds: float = Field(gt=0)


class Lend(Call):
    """Asks an engine that holds the version whole to give its weights to one peer of the same shape, while it serves."""

    version: int = Field(ge=0)
    wire: Wire
    deadline_seconds: float = Field(gt=0)


class LetGo(Call):
    """Ends the lending under way, and nothing else: when it is answered the engine does not lend any more."""


class Borrow(Call):
    """Asks an engine to take the weights of a lender, rank from rank of the same number, and to hold them as this version."""

    version: int = Field(ge=0)
    wire: Wire
    rendezvous: Rendezvous
    shape: str
    """The lender's :attr:`LendReport.shape`."""
    adapters: tuple[HeldAdapter, ...] = ()
    """The lender's :attr:`LendReport.adapters`: the borrower serves these and no others once it has committed."""
    staged: bool = False
    """Take the weights beside the live ones, while the engine serves; refused with NoRoom where they do not fit. Adapters stay as they
    are, so this is for a borrower that has the lender's already."""
    pause: PauseMode = PauseMode.ABORT
    """What becomes of requests in flight where a serving engine takes them in place."""
    pause_seconds: float = Field(default=30.0, gt=0)
    """How long that pause may take to come about."""
    deadline_seconds: float = Field(gt=0)
    hold_seconds: float = Field(gt=0)


CALLS: Final[Mapping[str, type[Call]]] = {
    "admit": Admit,
    "check": Check,
    "join": Join,
    "prepare": Prepare,
    "pause": Pause,
    "receive": Receive,
    "commit": Commit,
    "resume": Resume,
    "abort": Abort,
    "reset-cache": ResetCache,
    "sleep": Sleep,
    "wake": Wake,
    "lend": Lend,
    "let-go": LetGo,
    "borrow": Borrow,
}
"""What each route below the root takes."""


class Locality(_Message):
    """What tells whether two processes can share memory: equal words mean that they can."""

    host: str = ""
    """Boot id, a slash and the IPC namespace: equal on two processes of one machine that may open each other's CUDA memory."""
    memory: str = ""
    """Boot id, a slash and the file system mounted at ``/dev/shm``: equal on two processes that see each other's files there, whatever
    their IPC namespaces."""


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
    staged: bool = Field(
        default=False,
        description="staged says that the version in flight lies beside the live weights, which still serve.",
    )
    stale_seconds: float | None = Field(
        default=None,
        description="staleSeconds is how much longer it may serve a version that is not the fleet's newest; None where it has no such "
        "permission, 0 once that has run out.",
    )
    held: bool = Field(
        default=False,
        description="held says that this engine refuses requests because a refit failed, whole as it may be.",
    )
    leaving: bool = Field(
        default=False, description="leaving says that the pod has been told to end, and finishes what it has begun."
    )
    lending: bool = Field(
        default=False, description="lending says that a peer takes this engine's weights, or that it listens for one."
    )
    vllm_version: str = ""
    nccl_version: str = ""
    devices: tuple[str, ...] = ()
    """GPU UUIDs in rank order; ``cpu`` for engines on CPUs."""
    locality: Locality = Field(default_factory=Locality)
    sleep_level: int = 0
    asleep: tuple[WakeTag, ...] = ()
    """What has left the device; an engine whose weights are back may be refitted before its cache is."""
    environment: dict[str, str] = Field(default_factory=dict)
    """The variables with a communication prefix, for comparison across members."""
    adapters: dict[str, int] = Field(default_factory=dict)
    """By name of each adapter that is served, the version that brought it."""
    message: str = ""


class LayoutSummary(_Message):
    """What one rank's layout of a manifest comes to; the layout itself travels through the session's store."""

    digest: str
    shape: str
    """Equal for two ranks exactly when their live tensors have equal names, types and shapes, so that one can lend to the other."""
    placed_bytes: int
    """Bytes that are written straight into live parameters."""
    detoured_bytes: int
    """Bytes of source tensors that go through vLLM's loader, as the rank receives them."""
    detours: tuple[str, ...] = ()
    """Why tensors take the detour, at most eight sentences."""
    staging_bytes: int = 0
    """Device memory that a second buffer for this layout takes: whole parameters, aligned, be all of them placed or not."""
    room_bytes: int = 0
    """Device memory that may be taken for one now, what the rank's present one holds included; where the device is the host's memory,
    no more than the container's limit leaves."""

    @property
    def verified(self) -> bool:
        """Whether anything may be written in place: true once the layout has been compared with a load through vLLM's loader."""
        return self.placed_bytes > 0


class CheckReport(_Message):
    """Whether the engine's model can load a manifest, and where the tensors would go."""

    faults: ManifestFaults
    ignored: tuple[str, ...] = ()
    """Tensors that vLLM's loader skips on purpose (tied or derived)."""
    layouts: tuple[LayoutSummary, ...] = ()
    """By local rank; empty when there are faults."""


class JoinReport(_Message):
    """The pod is in the group."""

    ranks: tuple[int, ...]
    """The ranks that this pod's processes took, in local rank order."""


class PrepareReport(_Message):
    """Every local rank is ready to receive."""

    staging_bytes: int = 0
    """Bytes of the second buffers of all local ranks."""
    seconds: float


class ReceiveReport(_Message):
    """A version arrived and was loaded or staged; what arrived, for comparison with what was sent."""

    version: int
    tensors: int
    nbytes: int
    """Bytes that all local ranks together received."""
    received_digests: tuple[str, ...]
    """Digest of what each local rank holds now, in rank order: equal to the sender's for its layout, or the refit did not happen."""
    live_digests: tuple[str, ...] = ()
    """Digest of each local rank's live parameters after loading, in rank order; for a staged version, of what is about to be live."""
    layouts: tuple[LayoutSummary, ...] = ()
    """The layouts as they are now, when this load has changed what is known of them."""
    receive_seconds: float
    load_seconds: float
    slowest_rank: int = 0
    """The local rank that was last."""


class LendReport(_Message):
    """The lender's ranks listen; it goes on serving, and lets go by itself at the deadline."""

    rendezvous: Rendezvous
    shape: str
    """One digest over the shapes of all local ranks."""
    live_digests: tuple[str, ...]
    adapters: tuple[HeldAdapter, ...] = ()
    """What local rank 0 lends beside the weights, by name."""


class CommitReport(_Message):
    """A version is the one that the worker holds."""

    version: int
    cache_reset: bool | None
    """True or False is vLLM's own answer; None means that the policy kept the cache."""
    state: WorkerState = WorkerState.PAUSED
    """Serving when a staged version was swapped in between two steps, so that nothing is left to resume."""
    pause_seconds: float | None = None
    """How long the swap kept the model from running; None for an engine that was paused by itself."""


class CacheReport(_Message):
    """vLLM's own answer to a cache reset."""

    cache_reset: bool
