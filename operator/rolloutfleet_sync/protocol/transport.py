"""Which transport a refit takes, over which wire, whether it is staged, and why: one pure choice from what everybody said."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rolloutfleet.contract.policy import RefitPolicy, Staging, Transport, Verify, Wire
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import OpenSession
from rolloutfleet.contract.worker import LayoutSummary, WorkerReport, WorkerState
from rolloutfleet_sync.protocol.ledger import TRAINER, name_some
from rolloutfleet_sync.protocol.model import Choice, Seat

CPU = "cpu"
GIGA = 1e9
WIRE_WORDS = {Wire.NCCL: "over NCCL", Wire.GLOO: "over Gloo", Wire.MEMORY: "through shared memory"}


@dataclass(frozen=True, slots=True)
class Parties:
    """Everybody who would take part, and what each has said of itself."""

    request: OpenSession
    seats: Sequence[Seat]
    reports: Mapping[str, WorkerReport]
    """By pod uid."""
    layouts: Mapping[str, tuple[LayoutSummary, ...]]
    """By pod uid, by local rank; no entry for an engine that knows no layouts."""

    def devices(self) -> Iterator[tuple[Seat, str]]:
        """Every device of every engine; nothing for an engine that has not named its own."""
        for seat in self.seats:
            for device in self.reports[seat.pod_uid].devices:
                yield seat, device

    @property
    def trainer(self) -> str:
        return f"trainer {self.request.trainer}"


def choose_transport(policy: RefitPolicy, parties: Parties, *, holds_staging: bool = False) -> Choice | Problem:
    """The transport that the policy names, or the fastest that all can do; a Problem names who cannot do it, and why.

    ``holds_staging`` says that the workers already hold the second buffers of these layouts, so that room is no question.
    """
    chosen = _choose(policy.transport, parties)
    if isinstance(chosen, Problem) or not chosen.transport.by_layout or policy.staging is Staging.NEVER:
        return chosen
    if policy.verify is Verify.FULL:
        return replace(
            chosen, reason=f"{chosen.reason}; not staged, for refit.verify Full needs engines that stand still"
        )
    obstacle = _staging_obstacle(parties, holds_staging=holds_staging)
    if obstacle is None:
        return replace(chosen, staged=True)
    return replace(chosen, reason=f"{chosen.reason}; not staged, for {obstacle}")


def choose_adapter_transport(policy: RefitPolicy, parties: Parties) -> Choice | Problem:
    """How an adapter travels: by the layout in which every tensor goes whole to vLLM, always staged; Layout where fleets broadcast."""
    wanted = policy.transport if policy.transport.by_layout or policy.transport is Transport.AUTO else Transport.LAYOUT
    chosen = _choose(wanted, parties)
    if isinstance(chosen, Problem):
        return chosen
    if not chosen.transport.by_layout:
        return _impossible(f"an adapter travels by layout alone, but {chosen.reason}", parties)
    reason = chosen.reason
    if wanted is not policy.transport:
        reason = f"{_title(chosen.transport, chosen.wire)}: an adapter is no broadcast ({policy.transport})"
    return replace(chosen, staged=True, reason=reason)


def _choose(wanted: Transport, parties: Parties) -> Choice | Problem:
    mixed = _mixed_devices(parties)
    if mixed is not None:
        return mixed
    on_gpus = any(device != CPU for _, device in parties.devices())
    wire = Wire.NCCL if on_gpus and not _has_no_gpu(parties) else Wire.GLOO
    obstacles = {
        Transport.COLOCATED: _colocated_obstacle(parties) or _missing_layouts(parties),
        Transport.LAYOUT: _missing_layouts(parties) or _wire_obstacle(parties, wire),
        Transport.NATIVE: _broadcast_obstacle(parties, Transport.NATIVE),
        Transport.GLOO: _broadcast_obstacle(parties, Transport.GLOO),
    }
    wires = {
        Transport.COLOCATED: Wire.MEMORY,
        Transport.LAYOUT: wire,
        Transport.NATIVE: Wire.NCCL,
        Transport.GLOO: Wire.GLOO,
    }
    if wanted is not Transport.AUTO:
        obstacle = obstacles[wanted]
        if obstacle is not None:
            return _impossible(f"refit.transport is {wanted}, but {obstacle}", parties)
        why = "; ".join(["the policy says so", *_through_host(parties, wires[wanted])])
        return Choice(wanted, wires[wanted], staged=False, reason=f"{_title(wanted, wires[wanted])}: {why}")
    broadcast = Transport.NATIVE if on_gpus else Transport.GLOO
    passed: list[str] = []
    for transport in (Transport.COLOCATED, Transport.LAYOUT, broadcast):
        obstacle = obstacles[transport]
        if obstacle is None:
            reason = "; ".join([*passed, *_through_host(parties, wires[transport])]) or _shared(parties)
            return Choice(
                transport, wires[transport], staged=False, reason=f"{_title(transport, wires[transport])}: {reason}"
            )
        if obstacle not in passed:
            passed.append(obstacle)
    return _impossible(f"no transport fits: {'; '.join(passed)}", parties)


def _through_host(parties: Parties, wire: Wire) -> list[str]:
    """What is to be said of engines on GPUs that gloo reaches."""
    if wire is not Wire.GLOO or all(device == CPU for _, device in parties.devices()):
        return []
    return [f"{parties.trainer} has no GPU for NCCL, so all bytes pass through the memory of the hosts"]


def _has_no_gpu(parties: Parties) -> bool:
    """Whether the trainer's tensors lie in the host's memory, and NCCL has no device there to send from."""
    return set(parties.request.devices) == {CPU} and not parties.request.nccl_version


def _shared(parties: Parties) -> str:
    if CPU in parties.request.devices:
        return "trainer and engines share the memory of one host"
    return "trainer and engines share their GPUs"


def _title(transport: Transport, wire: Wire) -> str:
    return f"{transport} {WIRE_WORDS[wire]}" if transport.by_layout else transport.value


def _impossible(message: str, parties: Parties) -> Problem:
    named = [seat.pod_name for seat in parties.seats if seat.pod_name in message]
    return Problem(
        code=ProblemCode.TRANSPORT_UNAVAILABLE,
        message=f"{message}; nothing was paused or changed",
        member=named[0] if len(named) == 1 else TRAINER if not named and parties.trainer in message else "",
    )


def _name(pods: Collection[str], one: str, many: str) -> str:
    return f"{name_some(pods)} {one if len(pods) == 1 else many}"


def _mixed_devices(parties: Parties) -> Problem | None:
    on_cpus = {seat.pod_name for seat, device in parties.devices() if device == CPU}
    on_gpus = {seat.pod_name for seat, device in parties.devices() if device != CPU}
    if not on_cpus or not on_gpus:
        return None
    return _impossible(
        f"{_name(on_cpus, 'runs', 'run')} on CPUs and {name_some(on_gpus)} on GPUs; one group needs engines of one kind",
        parties,
    )


def _colocated_obstacle(parties: Parties) -> str | None:
    request = parties.request
    silent = [seat.pod_name for seat in parties.seats if not parties.reports[seat.pod_uid].devices]
    if silent:
        return f"{_name(silent, 'does', 'do')} not say on which devices the ranks run"
    in_host_memory = set(request.devices) == {CPU}
    if in_host_memory or all(device == CPU for _, device in parties.devices()):
        if not request.locality.memory or not in_host_memory:
            return f"the tensors of {parties.trainer} are not in memory that it can share"
        key = "memory"
    else:
        if not request.locality.host or CPU in request.devices or not request.devices:
            return f"the tensors of {parties.trainer} are not on a GPU that it can share"
        key = "host"
    mine = getattr(request.locality, key)
    apart = [seat for seat in parties.seats if getattr(parties.reports[seat.pod_uid].locality, key) != mine]
    if apart:
        return _apart(parties, apart, key)
    if key == "memory":
        return None
    foreign = {f"{seat.pod_name} on {device}" for seat, device in parties.devices() if device not in request.devices}
    if foreign and len(foreign) == sum(seat.ranks for seat in parties.seats):
        return "trainer and engines share no device"
    if foreign:
        return f"{parties.trainer} has no tensors on the GPUs of {name_some(foreign)}"
    # A rank maps the memory of every trainer rank, and its pod's own GPUs are all that it is known to see.
    unseen = [
        f"{seat.pod_name} does not see {name_some(hidden)}"
        for seat in parties.seats
        if (hidden := set(request.devices) - set(parties.reports[seat.pod_uid].devices))
    ]
    return f"{name_some(unseen)}, where {parties.trainer} holds tensors" if unseen else None


_SHARED_BY_NOBODY = {
    "memory": "no memory",
    "IPC namespace": "GPUs, but no IPC namespace",
    "host": "no device",
}


def _apart(parties: Parties, apart: Sequence[Seat], key: str) -> str:
    """What it is that these engines do not share with the trainer, as far as it is known."""
    devices = {device for seat in apart for device in parties.reports[seat.pod_uid].devices}
    shared = devices & set(parties.request.devices)
    lacking = "memory" if key == "memory" else "IPC namespace" if shared else "host"
    if len(apart) == len(parties.seats):
        return f"trainer and engines share {_SHARED_BY_NOBODY[lacking]}"
    return f"{_name([seat.pod_name for seat in apart], 'shares', 'share')} no {lacking} with {parties.trainer}"


def _missing_layouts(parties: Parties) -> str | None:
    lacking = [seat.pod_name for seat in parties.seats if len(parties.layouts.get(seat.pod_uid, ())) != seat.ranks]
    if lacking:
        return f"{name_some(lacking)} gave no layout of this manifest"
    return None


def _broadcast_obstacle(parties: Parties, transport: Transport) -> str | None:
    if parties.request.ranks > 1:
        return f"{transport} broadcasts whole tensors from one trainer rank, and {parties.trainer} has {parties.request.ranks}"
    if transport is Transport.NATIVE:
        on_cpus = {seat.pod_name for seat, device in parties.devices() if device == CPU}
        if on_cpus:
            return f"{transport} needs GPUs, and {_name(on_cpus, 'runs', 'run')} on CPUs"
        return _wire_obstacle(parties, Wire.NCCL)
    on_gpus = {seat.pod_name for seat, device in parties.devices() if device != CPU}
    return f"{transport} is for engines on CPUs, and {_name(on_gpus, 'runs', 'run')} on GPUs" if on_gpus else None


def _wire_obstacle(parties: Parties, wire: Wire) -> str | None:
    """NCCL joins ranks on GPUs of their own: a trainer whose tensors lie in the host's memory takes part when it has one to send from."""
    if wire is not Wire.NCCL:
        return None
    request = parties.request
    if set(request.devices) <= {CPU} and not request.nccl_version:
        return f"{parties.trainer} has no NCCL, and the engines run on GPUs"
    ranks: dict[str, list[str]] = defaultdict(list)
    for seat in parties.seats:
        for rank, device in enumerate(parties.reports[seat.pod_uid].devices):
            ranks[device].append(f"rank {rank} of {seat.pod_name}")
    for rank, device in enumerate(request.devices):
        ranks[device].append(f"rank {rank} of {parties.trainer}")
    for device, sharers in sorted(ranks.items()):
        if device != CPU and len(sharers) > 1:
            remedy = "give each rank a GPU of its own"
            if 0 < request.devices.count(device) < len(sharers):
                remedy += ", or trainer and engines what Colocated needs"
            return f"NCCL takes every GPU once, and {device} is that of {' and of '.join(sharers[:4])}: {remedy}"
    return None


def _staging_obstacle(parties: Parties, *, holds_staging: bool) -> str | None:
    for seat in parties.seats:
        if parties.reports[seat.pod_uid].state not in {WorkerState.SERVING, WorkerState.PAUSED}:
            return f"{seat.pod_name} holds no whole version to serve meanwhile"
        for rank, layout in enumerate(parties.layouts[seat.pod_uid]):
            if not layout.verified:
                return f"the layout of rank {rank} of {seat.pod_name} has not been verified by a load yet"
            if layout.detoured_bytes:
                return f"rank {rank} of {seat.pod_name} takes {_gigabytes(layout.detoured_bytes)} through vLLM's loader"
    return None if holds_staging else _room_obstacle(parties)


def _room_obstacle(parties: Parties) -> str | None:
    """Ranks of one GPU share its room, and so do those on the CPUs of one host, whatever their pods and namespaces."""
    needed: dict[str, int] = defaultdict(int)
    room: dict[str, int] = {}
    where: dict[str, str] = {}
    for seat in parties.seats:
        report = parties.reports[seat.pod_uid]
        for rank, layout in enumerate(parties.layouts[seat.pod_uid]):
            device = report.devices[rank] if rank < len(report.devices) else f"{seat.pod_uid} {rank}"
            key = f"{CPU} of {_machine(report) or seat.pod_uid}" if device == CPU else device
            needed[key] += max(layout.staging_bytes, layout.placed_bytes)
            room[key] = min(room.get(key, layout.room_bytes), layout.room_bytes)
            where.setdefault(key, f"rank {rank} of {seat.pod_name}")
    for key, nbytes in needed.items():
        if nbytes > room[key]:
            return f"{where[key]} has room for {_gigabytes(room[key])} of {_gigabytes(nbytes)}"
    return None


def _machine(report: WorkerReport) -> str:
    """The boot id: the host without the namespace."""
    return report.locality.host.partition("/")[0]


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / GIGA:.3g} GB"
