"""The ledger of a refit: who takes part, as which ranks, and whether they fit together."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rolloutfleet.contract.manifest import ManifestFaults
from rolloutfleet.contract.members import Member, Roster
from rolloutfleet.contract.names import CONTRACT_VERSION
from rolloutfleet.contract.policy import Wire
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import OpenSession
from rolloutfleet.contract.worker import WorkerReport, WorkerState
from rolloutfleet_sync.protocol.model import Refit, Seat

COMPARED_PREFIXES: dict[Wire, tuple[str, ...]] = {Wire.GLOO: ("GLOO_",), Wire.NCCL: ("NCCL_",), Wire.MEMORY: ()}
"""Communication variables that matter to each wire."""

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


def plan_seats(members: Iterable[Member], instances: Mapping[str, str], trainer_ranks: int) -> tuple[Seat, ...]:
    """One seat per member: the trainer has the first ranks, workers follow by engine, then by local rank."""
    seats = []
    offset = trainer_ranks
    for member in sorted(members, key=lambda member: member.engine):
        uid = member.pod_uid
        seats.append(Seat(member.engine, member.pod_name, uid, instances[uid], member.address, member.ranks, offset))
        offset += member.ranks
    return tuple(seats)


def world_size(seats: Iterable[Seat], trainer_ranks: int) -> int:
    """Workers plus trainer ranks."""
    return trainer_ranks + sum(seat.ranks for seat in seats)


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
    if request.world_size == workers + request.ranks:
        return None
    return Problem(
        code=ProblemCode.WORLD_SIZE_MISMATCH,
        message=(
            f"trainer {request.trainer} counts a world of {request.world_size}, fleet {roster.fleet} has "
            f"{workers + request.ranks}: {workers} workers on {len(roster.members)} engines and "
            f"{_trainer_ranks(request)}; leave worldSize out or correct it"
        ),
        member=TRAINER,
    )


def _trainer_ranks(request: OpenSession) -> str:
    return f"{request.ranks} trainer rank{'' if request.ranks == 1 else 's'}"


def find_ledger_mismatch(
    seats: Sequence[Seat], reports: Mapping[str, WorkerReport], request: OpenSession
) -> Problem | None:
    """The first reason why these parties cannot form a group, whatever its wire; or None."""
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
    size = world_size(seats, request.ranks)
    if request.world_size is not None and request.world_size != size:
        return Problem(
            code=ProblemCode.WORLD_SIZE_MISMATCH,
            message=(
                f"trainer {request.trainer} counts a world of {request.world_size}, the group has {size}: "
                f"{size - request.ranks} workers and {_trainer_ranks(request)}; leave worldSize out or correct it"
            ),
            member=TRAINER,
        )
    return None


def find_environment_mismatch(
    seats: Sequence[Seat], reports: Mapping[str, WorkerReport], request: OpenSession, wire: Wire
) -> Problem | None:
    """Variables and versions that differ although a group over this wire needs them equal; or None."""
    environments = {seat.pod_name: reports[seat.pod_uid].environment for seat in seats}
    versions = {seat.pod_name: reports[seat.pod_uid].nccl_version for seat in seats}
    differences = find_differences(
        environments | {TRAINER: request.environment}, versions | {TRAINER: request.nccl_version}, wire
    )
    if not differences:
        return None
    return Problem(
        code=ProblemCode.ENVIRONMENT_MISMATCH,
        message=f"{'; '.join(differences)}; make them equal on trainer and engines, a group that differs hangs",
    )


def find_differences(
    environments: Mapping[str, Mapping[str, str]], nccl_versions: Mapping[str, str], wire: Wire
) -> list[str]:
    """Which variables that matter to this wire, or versions of its library, differ between parties, and who has which value."""
    prefixes = COMPARED_PREFIXES[wire]
    names = {name for environment in environments.values() for name in environment if name.startswith(prefixes)}
    differences = []
    for name in sorted(names - PER_HOST_VARIABLES):
        values = {party: environment.get(name) for party, environment in environments.items()}
        if len(set(values.values())) > 1:
            differences.append(f"{name} is {_who_has_what(values)}")
    if wire is Wire.NCCL:
        known: dict[str, str | None] = {party: version for party, version in nccl_versions.items() if version}
        if len(set(known.values())) > 1:
            differences.append(f"the NCCL version is {_who_has_what(known)}")
    return differences


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


def find_lacking_base(
    refit: Refit, seats: Sequence[Seat], reports: Mapping[str, WorkerReport], version: int
) -> Problem | None:
    """Which engines do not hold the committed version whole, on top of which an adapter goes; None for a refit of all weights."""
    if refit.adapter is None:
        return None
    whole = {WorkerState.SERVING, WorkerState.PAUSED}
    lacking = [
        seat.pod_name
        for seat in seats
        if reports[seat.pod_uid].state not in whole or reports[seat.pod_uid].version != version
    ]
    if not lacking:
        return None
    return Problem(
        code=ProblemCode.WRONG_STATE,
        message=(
            f"adapter {refit.adapter.name} goes on top of version {version}, which {name_some(lacking)} "
            f"{'does' if len(lacking) == 1 else 'do'} not hold; wait until it is taken over from a peer, or refit all weights; "
            "nothing was changed"
        ),
        member=lacking[0] if len(lacking) == 1 else "",
    )
