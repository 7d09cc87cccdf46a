"""A fake engine: the worker's real fence over weights that are a version and a digest."""

import hashlib
from dataclasses import dataclass, field

from rolloutfleet.contract.manifest import Manifest, ManifestFaults
from rolloutfleet.contract.members import Member
from rolloutfleet.contract.policy import CachePolicy
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import (
    Abort,
    Admit,
    CacheReport,
    Call,
    Check,
    CheckReport,
    Commit,
    CommitReport,
    Join,
    JoinReport,
    Pause,
    Receive,
    ReceiveReport,
    ResetCache,
    Resume,
    WorkerReport,
    WorkerState,
)
from rolloutfleet_worker.fence import Fence, Identity


@dataclass
class FakeEngine:
    """One launcher process and its engine, from its start to its end."""

    member: Member
    instance: str
    fleet_uid: str = "fleet-uid"
    environment: dict[str, str] = field(default_factory=dict)
    nccl_version: str = ""
    tensors: frozenset[str] | None = None
    """Names that the model has; None accepts every manifest."""
    cache_answer: bool = True
    corrupts: bool = False
    weights: tuple[int, str] | None = (0, "")
    """Version and digest of what is in memory; None while it is a mixture."""
    calls: list[tuple[str, Call]] = field(default_factory=list)

    def __post_init__(self):
        identity = Identity("f", self.fleet_uid, self.member.pod_name, self.member.pod_uid)
        self.fence = Fence(identity).started()
        self._before: WorkerState = self.fence.state
        self._received = ""

    @property
    def name(self) -> str:
        return self.member.pod_name

    @property
    def serves(self) -> bool:
        """Whether the engine generates for the fleet's users."""
        return self.fence.state is WorkerState.SERVING and not self.fence.unready_reason()

    def report(self) -> WorkerReport:
        fence = self.fence
        return WorkerReport(
            fleet_uid=self.fleet_uid,
            pod_name=self.name,
            pod_uid=self.member.pod_uid,
            instance=self.instance,
            engine=self.member.engine,
            ranks=self.member.ranks,
            state=fence.state,
            epoch=fence.epoch,
            version=fence.version,
            version_in_flight=fence.version_in_flight,
            received_digest=self._received if fence.state is WorkerState.RECEIVED else "",
            admitted=fence.admitted,
            nccl_version=self.nccl_version,
            environment=self.environment,
            message=fence.message,
        )

    def handle(self, call: Call) -> WorkerReport | CheckReport | JoinReport | CommitReport | CacheReport:
        """The answer to any call but ``receive``; raises ProblemError as a launcher answers a problem."""
        self.fence = self.fence.accept(call)
        self.calls.append((type(call).__name__, call))
        match call:
            case Check():
                return CheckReport(faults=self._faults(call.manifest))
            case Join():
                self.fence = self.fence.join_begins().join_done()
                return JoinReport(ranks=tuple(range(call.rank_offset, call.rank_offset + self.member.ranks)))
            case Commit():
                return self._commit(call)
            case ResetCache():
                return CacheReport(cache_reset=self.cache_answer)
            case Admit():
                self.fence = self.fence.admit(call.version)
            case Pause():
                self.fence = self.fence.pause_begins().paused()
            case Resume():
                self.fence = self.fence.resume_begins().resumed()
            case Abort():
                self._abort(call.reason)
        return self.report()

    def begin_receive(self, call: Receive) -> None:
        """Weights change from here until :meth:`finish_receive` or :meth:`fail_receive`."""
        self.fence = self.fence.accept(call)
        self.calls.append(("Receive", call))
        self._before = self.fence.state
        self.fence = self.fence.receive_begins(call.version)
        self.weights = None

    def finish_receive(self, call: Receive, digest: str) -> ReceiveReport:
        if self.fence.state is not WorkerState.RECEIVING or call.epoch != self.fence.epoch:
            raise ProblemError(ProblemCode.TRANSFER_FAILED, f"{self.name}: the transfer was aborted")
        if self.corrupts:
            digest = hashlib.sha256(digest.encode()).hexdigest()
        self.fence = self.fence.receive_done()
        self.weights = (call.version, digest)
        self._received = digest
        return ReceiveReport(
            version=call.version,
            tensors=len(call.manifest.tensors),
            nbytes=call.manifest.nbytes,
            received_digest=digest,
            live_digests=tuple(f"{digest}-{rank}" for rank in range(self.member.ranks)),
            receive_seconds=0.1,
            load_seconds=0.1,
        )

    def fail_receive(self, message: str) -> ProblemError:
        """End the transfer half way: the engine is dirty."""
        if self.fence.state is WorkerState.RECEIVING:
            self.fence = self.fence.receive_failed(touched=True, was=self._before, message=message)
        return ProblemError(ProblemCode.TRANSFER_FAILED, f"{self.name}: {message}", member=self.name)

    def _faults(self, manifest: Manifest) -> ManifestFaults:
        if self.tensors is None:
            return ManifestFaults()
        sent = {tensor.name for tensor in manifest.tensors}
        return ManifestFaults(missing=tuple(sorted(self.tensors - sent)), extra=tuple(sorted(sent - self.tensors)))

    def _commit(self, call: Commit) -> CommitReport:
        fresh = self.fence.state is WorkerState.RECEIVED
        self.fence = self.fence.commit(call.version)
        if call.cache is CachePolicy.KEEP:
            return CommitReport(version=call.version, cache_reset=None)
        if fresh and not self.cache_answer:
            self.fence = self.fence.cache_not_reset()
            return CommitReport(version=call.version, cache_reset=False)
        return CommitReport(version=call.version, cache_reset=True)

    def _abort(self, reason: str) -> None:
        if self.fence.state is WorkerState.RECEIVING:
            self.fail_receive(reason)
        self.fence = self.fence.aborted(reason)
        if self.fence.resumable:
            self.fence = self.fence.resumed()
