"""The ledger of a refit: who takes part, as which ranks, and whether they fit together."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

from rolloutfleet.contract.manifest import Manifest, ManifestFaults
from rolloutfleet.contract.members import Member, Roster
from rolloutfleet.contract.names import CONTRACT_VERSION
from rolloutfleet.contract.policy import Transport
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import OpenSession, TrainerSent
from rolloutfleet.contract.worker import ReceiveReport, WorkerReport
from rolloutfleet_sync.protocol.model import Seat

COMPARED_PREFIXES = {Transport.GLOO: ("GLOO_",), Transport.NATIVE: ("NCCL_",)}
"""Communication variables that matter to each transport."""

PER_HOST_VARIABLES = frozenset(
    {
        "GLOO_SOCKET_IFNAME",
        "NCCL_DEBUG",
        "NCCL_DEBUG_FILE",
        "NCCL_DEBUG_SUBSYS",
        "NCCL_GRAPH_DUMP_FILE",
        "NCCL_HOSTID",
        "NCCL_IB_HCA",
        "NCCL_SOCKET_IFNAME",
        "NCCL_TOPO_DUMP_FILE",
        "NCCL_TOPO_FILE",
    }
)
"""Variables that name a host's own devices or its log: they may differ without changing how the group communicates."""

TRAINER = "trainer"


def plan_seats(members: Iterable[Member], instances: Mapping[str, str]) -> tuple[Seat, ...]:
    """One seat per member: the trainer is rank 0, workers follow from 1 by engine, then by local rank."""
    seats = []
    offset = 1
    for member in sorted(members, key=lambda member: member.engine):
        uid = member.pod_uid
        seats.append(Seat(member.engine, member.pod_name, uid, instances[uid], member.address, member.ranks, offset))
        offset += member.ranks
    return tuple(seats)


def world_size(seats: Iterable[Seat]) -> int:
    """Workers plus trainer."""
    return 1 + sum(seat.ranks for seat in seats)


def name_some(names: Iterable[str], limit: int = 8) -> str:
    """The names in order, the rest as a count, for a message that stays readable."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:limit])
    return f"{shown} and {len(ordered) - limit} more" if len(ordered) > limit else shown


def find_world_mismatch(request: OpenSession, roster: Roster) -> Problem | None:
    """Why the trainer's world size is wrong; None when it fits, was not given, or engines are still missing."""
    if request.world_size is None or len(roster.members) < roster.engines:
        return None
    workers = sum(member.ranks for member in roster.members)
    if request.world_size == workers + 1:
        return None
    return Problem(
        code=ProblemCode.WORLD_SIZE_MISMATCH,
        message=(
            f"trainer {request.trainer} counts a world of {request.world_size}, fleet {roster.fleet} has {workers + 1}: "
            f"{workers} workers on {len(roster.members)} engines and 1 trainer; leave worldSize out or correct it"
        ),
        member=TRAINER,
    )


def find_ledger_mismatch(
    seats: Sequence[Seat], reports: Mapping[str, WorkerReport], request: OpenSession, transport: Transport
) -> Problem | None:
    """The first reason why these parties cannot form a group, or None."""
    for seat in seats:
        report = reports[seat.pod_uid]
        if report.contract_version != CONTRACT_VERSION:
            return Problem(
                code=ProblemCode.CONTRACT_MISMATCH,
                message=(
                    f"{seat.pod_name} speaks contract version {report.contract_version}, the sync job {CONTRACT_VERSION}; "
                    "use worker and operator images of one release"
                ),
                member=seat.pod_name,
            )
        if report.ranks != seat.ranks:
            return Problem(
                code=ProblemCode.WORLD_SIZE_MISMATCH,
                message=(
                    f"{seat.pod_name} has {report.ranks} ranks, the roster says {seat.ranks}; "
                    "its pod was started with another tensor parallel size"
                ),
                member=seat.pod_name,
            )
    size = world_size(seats)
    if request.world_size is not None and request.world_size != size:
        return Problem(
            code=ProblemCode.WORLD_SIZE_MISMATCH,
            message=(
                f"trainer {request.trainer} counts a world of {request.world_size}, the group has {size}: "
                f"{size - 1} workers and 1 trainer; leave worldSize out or correct it"
            ),
            member=TRAINER,
        )
    return _environment_mismatch(seats, reports, request, transport)


def _environment_mismatch(
    seats: Sequence[Seat], reports: Mapping[str, WorkerReport], request: OpenSession, transport: Transport
) -> Problem | None:
    environments = {seat.pod_name: reports[seat.pod_uid].environment for seat in seats}
    environments[TRAINER] = request.environment
    prefixes = COMPARED_PREFIXES[transport]
    names = {name for environment in environments.values() for name in environment if name.startswith(prefixes)}
    differences = []
    for name in sorted(names - PER_HOST_VARIABLES):
        values = {party: environment.get(name) for party, environment in environments.items()}
        if len(set(values.values())) > 1:
            differences.append(f"{name} is {_who_has_what(values)}")
    if transport is Transport.NATIVE:
        versions = {seat.pod_name: reports[seat.pod_uid].nccl_version for seat in seats}
        versions[TRAINER] = request.nccl_version
        known: dict[str, str | None] = {party: version for party, version in versions.items() if version}
        if len(set(known.values())) > 1:
            differences.append(f"the NCCL version is {_who_has_what(known)}")
    if not differences:
        return None
    return Problem(
        code=ProblemCode.ENVIRONMENT_MISMATCH,
        message=f"{'; '.join(differences)}; make them equal on trainer and engines, a group that differs hangs",
    )


def _who_has_what(values: Mapping[str, str | None]) -> str:
    holders: dict[str | None, list[str]] = defaultdict(list)
    for party, value in values.items():
        holders[value].append(party)
    ordered = sorted(holders.items(), key=lambda item: (item[0] is None, item[0] or ""))
    return " but ".join(
        f"{'unset' if value is None else repr(value)} on {name_some(parties)}" for value, parties in ordered
    )


def describe_faults(version: int, faults: Mapping[str, ManifestFaults], seats: Sequence[Seat]) -> Problem:
    """One problem that names every tensor that some engine cannot load."""
    by_sentence: dict[str, list[str]] = defaultdict(list)
    for seat in seats:
        found = faults.get(seat.pod_uid)
        if found:
            by_sentence[found.sentence()].append(seat.pod_name)
    sentences = [f"{name_some(pods)}: {sentence}" for sentence, pods in sorted(by_sentence.items())]
    blamed = {pod for pods in by_sentence.values() for pod in pods}
    return Problem(
        code=ProblemCode.MANIFEST_MISMATCH,
        message=(
            f"the manifest of version {version} does not fit the model on {len(blamed)} of {len(seats)} engines: "
            f"{' | '.join(sentences)}; nothing was paused or changed"
        ),
        member=min(blamed) if len(blamed) == 1 else "",
    )


def find_unverified(
    version: int,
    manifest: Manifest,
    sent: TrainerSent,
    seats: Sequence[Seat],
    received: Mapping[str, ReceiveReport],
) -> Problem | None:
    """The first way in which what arrived is not what was sent, or None when every member holds it."""
    expected = (len(manifest.tensors), manifest.nbytes)
    if (sent.tensors, sent.nbytes) != expected:
        return _digest_problem(
            f"the trainer sent {sent.tensors} tensors of {sent.nbytes} bytes, its manifest has {expected[0]} of {expected[1]}",
            TRAINER,
        )
    first_live: dict[int, tuple[Seat, tuple[str, ...]]] = {}
    for seat in seats:
        report = received[seat.pod_uid]
        if report.version != version:
            return _digest_problem(f"{seat.pod_name} loaded version {report.version}, not {version}", seat.pod_name)
        if (report.tensors, report.nbytes) != expected:
            return _digest_problem(
                f"{seat.pod_name} received {report.tensors} tensors of {report.nbytes} bytes, "
                f"not {expected[0]} of {expected[1]}",
                seat.pod_name,
            )
        if report.received_digest != sent.digest:
            return _digest_problem(
                f"{seat.pod_name} received bytes of digest {report.received_digest}, the trainer sent {sent.digest}",
                seat.pod_name,
            )
        if len(report.live_digests) != seat.ranks:
            return _digest_problem(
                f"{seat.pod_name} gave {len(report.live_digests)} live digests for {seat.ranks} ranks", seat.pod_name
            )
        reference, digests = first_live.setdefault(seat.ranks, (seat, report.live_digests))
        for rank, (mine, theirs) in enumerate(zip(report.live_digests, digests, strict=True)):
            if mine != theirs:
                return _digest_problem(
                    f"local rank {rank} of {seat.pod_name} holds live parameters of digest {mine}, "
                    f"that of {reference.pod_name} {theirs}",
                    seat.pod_name,
                )
    return None


def combine_live_digests(digests: Sequence[str]) -> str:
    """One hex digest over the live parameters of all ranks of an engine."""
    return sha256("\n".join(digests).encode()).hexdigest()


def _digest_problem(message: str, member: str) -> Problem:
    return Problem(
        code=ProblemCode.DIGEST_MISMATCH,
        message=f"{message}; the version is not published, send it again",
        member=member,
    )
