"""Which transport a refit takes: one choice from what everybody has said, with a reason that people can read."""

from typing import Any

import pytest

from rolloutfleet.contract.members import Member
from rolloutfleet.contract.policy import RefitPolicy, Staging, Transport, Verify, Wire
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import OpenSession
from rolloutfleet.contract.worker import LayoutSummary, Locality, Rendezvous, WorkerReport, WorkerState
from rolloutfleet_sync.protocol.ledger import plan_seats
from rolloutfleet_sync.protocol.model import Choice
from rolloutfleet_sync.protocol.transport import Parties, choose_transport

GB = 10**9
HERE, THERE = Locality(host="here", memory="shm"), Locality(host="there", memory="other shm")


def layout(**change: Any) -> LayoutSummary:
    good = {"digest": "d", "shape": "s", "placed_bytes": 15 * GB, "detoured_bytes": 0, "room_bytes": 20 * GB}
    return LayoutSummary.model_validate(good | change)


def parties(
    *devices: tuple[str, ...],
    trainer: dict[str, Any] | None = None,
    locality: Locality = HERE,
    reports: dict[int, dict[str, Any]] | None = None,
    layouts: dict[int, tuple[LayoutSummary, ...]] | None = None,
) -> Parties:
    """One engine for each tuple of devices; further fields of trainer, reports and layouts by engine."""
    members = [
        Member(engine=number, pod_name=f"p{number}", pod_uid=f"u{number}", address="10.0.0.1", ranks=max(len(each), 1))
        for number, each in enumerate(devices)
    ]
    said = {
        member.pod_uid: WorkerReport.model_validate(
            {
                "fleet_uid": "f",
                "pod_name": member.pod_name,
                "pod_uid": member.pod_uid,
                "instance": "i",
                "engine": member.engine,
                "ranks": member.ranks,
                "state": WorkerState.SERVING,
                "epoch": 1,
                "version": 0,
                "devices": devices[member.engine],
                "locality": locality,
            }
            | (reports or {}).get(member.engine, {})
        )
        for member in members
    }
    known = {
        member.pod_uid: (layouts or {}).get(member.engine, (layout(),) * member.ranks)
        for member in members
        if (layouts or {}).get(member.engine, True)
    }
    asked: dict[str, Any] = {"trainer": "t", "rendezvous": Rendezvous(host="10.1.1.1", port=1), "locality": THERE}
    request = OpenSession.model_validate(asked | {"devices": ("GPU-t",), "nccl_version": "2.28"} | (trainer or {}))
    return Parties(request, plan_seats(members, dict.fromkeys(said, "i"), request.ranks), said, known)


def choose(
    made: Parties, wanted: Transport = Transport.AUTO, staging: Staging = Staging.AUTO, *, held: bool = False
) -> Choice:
    chosen = choose_transport(RefitPolicy(transport=wanted, staging=staging), made, holds_staging=held)
    assert isinstance(chosen, Choice), chosen
    return chosen


def refuse(made: Parties, wanted: Transport) -> Problem:
    problem = choose_transport(RefitPolicy(transport=wanted), made)
    assert isinstance(problem, Problem), problem
    assert problem.code is ProblemCode.TRANSPORT_UNAVAILABLE
    return problem


CPU_TRAINER = {"devices": ("cpu",), "nccl_version": "", "locality": HERE}
GPU_TRAINER = {"devices": ("GPU-0", "GPU-1"), "ranks": 2, "locality": HERE}
TWICE, OWN = "NCCL takes every GPU once, and", "give each rank a GPU of its own"
OTHER_NAMESPACE = Locality(host="boot/2", memory="boot/shm")


@pytest.mark.parametrize(
    ("made", "transport", "wire", "reason"),
    [
        (
            parties(("GPU-0", "GPU-1"), ("GPU-1", "GPU-0"), trainer=GPU_TRAINER),
            Transport.COLOCATED,
            Wire.MEMORY,
            "Colocated through shared memory: trainer and engines share their GPUs",
        ),
        (
            parties(("GPU-0",), trainer=GPU_TRAINER | {"devices": ("GPU-0", "GPU-0")}),
            Transport.COLOCATED,
            Wire.MEMORY,
            "Colocated through shared memory: trainer and engines share their GPUs",
        ),
        (
            parties(("cpu", "cpu"), ("cpu", "cpu"), trainer=CPU_TRAINER),
            Transport.COLOCATED,
            Wire.MEMORY,
            "Colocated through shared memory: trainer and engines share the memory of one host",
        ),
        (
            parties(("GPU-0",), ("GPU-1",)),
            Transport.LAYOUT,
            Wire.NCCL,
            "Layout over NCCL: trainer and engines share no device",
        ),
        (
            parties(("GPU-2",), ("GPU-3",), trainer=GPU_TRAINER, reports={1: {"locality": THERE}}),
            Transport.LAYOUT,
            Wire.NCCL,
            "Layout over NCCL: p1 shares no host with trainer t",
        ),
        (
            parties(("GPU-0",), ("GPU-1",), trainer=CPU_TRAINER),
            Transport.COLOCATED,
            Wire.MEMORY,
            "Colocated through shared memory: trainer and engines share the memory of one host",
        ),
        (
            parties(("GPU-0",), trainer=CPU_TRAINER | {"nccl_version": "2.28", "locality": THERE}),
            Transport.LAYOUT,
            Wire.NCCL,
            "Layout over NCCL: trainer and engines share no memory",
        ),
        (
            parties(("cpu",), trainer=CPU_TRAINER | {"locality": THERE}),
            Transport.LAYOUT,
            Wire.GLOO,
            "Layout over Gloo: trainer and engines share no memory",
        ),
        (
            parties((), trainer=CPU_TRAINER),
            Transport.LAYOUT,
            Wire.GLOO,
            "Layout over Gloo: p0 does not say on which devices the ranks run",
        ),
        (
            parties(("GPU-0",), ("GPU-1",), layouts={1: ()}),
            Transport.NATIVE,
            Wire.NCCL,
            "Native: trainer and engines share no device; p1 gave no layout of this manifest",
        ),
        (
            parties(("cpu",), trainer=CPU_TRAINER | {"locality": THERE}, layouts={0: ()}),
            Transport.GLOO,
            Wire.GLOO,
            "Gloo: trainer and engines share no memory; p0 gave no layout of this manifest",
        ),
    ],
    ids=lambda value: value.value if isinstance(value, Transport) else None,
)
def test_auto_takes_the_first_that_all_can_do_and_says_why(
    made: Parties, transport: Transport, wire: Wire, reason: str
):
    choice = choose(made, staging=Staging.NEVER)
    assert (choice.transport, choice.wire, choice.staged) == (transport, wire, False)
    assert choice.reason == reason


@pytest.mark.parametrize(
    ("made", "wanted", "words", "member"),
    [
        (parties(("GPU-0",)), Transport.COLOCATED, "trainer and engines share no device", ""),
        (
            parties(("GPU-0",), ("GPU-2",), trainer=GPU_TRAINER | {"devices": ("GPU-0",), "ranks": 1}),
            Transport.COLOCATED,
            "trainer t has no tensors on the GPUs of p1 on GPU-2",
            "p1",
        ),
        (
            parties(("GPU-0",), ("GPU-1",), trainer=GPU_TRAINER),
            Transport.COLOCATED,
            "p0 does not see GPU-1, p1 does not see GPU-0, where trainer t holds tensors",
            "",
        ),
        (
            parties(("GPU-0",), trainer=GPU_TRAINER),
            Transport.COLOCATED,
            "p0 does not see GPU-1, where trainer t holds tensors",
            "p0",
        ),
        (
            parties(("GPU-0",), trainer={"devices": ("GPU-0",), "locality": OTHER_NAMESPACE}),
            Transport.COLOCATED,
            "trainer and engines share GPUs, but no IPC namespace",
            "",
        ),
        (
            parties(
                ("GPU-0",),
                ("GPU-0",),
                trainer=GPU_TRAINER | {"devices": ("GPU-0",), "ranks": 1},
                reports={1: {"locality": OTHER_NAMESPACE}},
            ),
            Transport.COLOCATED,
            "p1 shares no IPC namespace with trainer t",
            "p1",
        ),
        (
            parties(("GPU-0",), trainer={"devices": ("GPU-0",)}),
            Transport.LAYOUT,
            f"{TWICE} GPU-0 is that of rank 0 of p0 and of rank 0 of trainer t: {OWN}, or trainer and engines what Colocated needs",
            "p0",
        ),
        (
            parties(("GPU-0",), ("GPU-1",), ("GPU-0",)),
            Transport.NATIVE,
            f"{TWICE} GPU-0 is that of rank 0 of p0 and of rank 0 of p2: {OWN}",
            "",
        ),
        (
            parties(("GPU-0",), trainer={"devices": ("GPU-t", "GPU-t"), "ranks": 2}),
            Transport.LAYOUT,
            f"{TWICE} GPU-t is that of rank 0 of trainer t and of rank 1 of trainer t: {OWN}",
            "trainer",
        ),
        (
            parties(("GPU-0",), trainer={"devices": (), "nccl_version": ""}),
            Transport.LAYOUT,
            "trainer t has no NCCL, and the engines run on GPUs",
            "trainer",
        ),
        (parties(("GPU-0",), layouts={0: ()}), Transport.LAYOUT, "p0 gave no layout of this manifest", "p0"),
        (parties(("cpu",), ("cpu",)), Transport.NATIVE, "Native needs GPUs, and p0, p1 run on CPUs", ""),
        (parties(("GPU-0",)), Transport.GLOO, "Gloo is for engines on CPUs, and p0 runs on GPUs", "p0"),
        (
            parties(("GPU-0",), trainer={"ranks": 4}),
            Transport.NATIVE,
            "Native broadcasts whole tensors from one trainer rank, and trainer t has 4",
            "trainer",
        ),
    ],
)
def test_a_transport_that_is_asked_for_is_taken_or_refused_with_who_cannot(
    made: Parties, wanted: Transport, words: str, member: str
):
    problem = refuse(made, wanted)
    assert problem.message == f"refit.transport is {wanted}, but {words}; nothing was paused or changed"
    assert problem.member == member


@pytest.mark.parametrize("wanted", [Transport.LAYOUT, Transport.NATIVE])
def test_a_transport_that_is_asked_for_is_not_replaced_by_a_faster_one(wanted: Transport):
    made = parties(("GPU-0",), trainer=CPU_TRAINER | {"nccl_version": "2.28"})
    assert choose(made).transport is Transport.COLOCATED
    choice = choose(made, wanted, Staging.NEVER)
    assert choice.transport is wanted
    assert choice.reason.endswith(": the policy says so")


def test_engines_of_two_kinds_never_form_a_group():
    problem = refuse(parties(("cpu",), ("GPU-0",)), Transport.AUTO)
    assert problem.message.startswith("p0 runs on CPUs and p1 on GPUs; one group needs engines of one kind")


def test_when_nothing_fits_every_obstacle_is_told():
    problem = refuse(parties(("GPU-0",), trainer={"ranks": 2}, layouts={0: ()}), Transport.AUTO)
    assert problem.message == (
        "no transport fits: trainer and engines share no device; p0 gave no layout of this manifest; "
        "Native broadcasts whole tensors from one trainer rank, and trainer t has 2; nothing was paused or changed"
    )


@pytest.mark.parametrize(
    ("made", "obstacle"),
    [
        (parties(("GPU-0",), ("GPU-1",)), None),
        (
            parties(("GPU-0",), layouts={0: (layout(placed_bytes=0, detoured_bytes=15 * GB),)}),
            "the layout of rank 0 of p0 has not been verified by a load yet",
        ),
        (
            parties(("GPU-0", "GPU-1"), layouts={0: (layout(), layout(detoured_bytes=2 * GB))}),
            "rank 1 of p0 takes 2 GB through vLLM's loader",
        ),
        (
            parties(("GPU-0",), ("GPU-1",), layouts={1: (layout(room_bytes=14 * GB),)}),
            "rank 0 of p1 has room for 14 GB of 15 GB",
        ),
        (
            parties(("GPU-0",), ("GPU-1",), reports={1: {"state": WorkerState.DIRTY}}),
            "p1 holds no whole version to serve meanwhile",
        ),
        (
            parties(("GPU-0",), layouts={0: (layout(staging_bytes=21 * GB),)}),
            "rank 0 of p0 has room for 20 GB of 21 GB",
        ),
        (parties(("cpu", "cpu")), "rank 0 of p0 has room for 20 GB of 30 GB"),
        (parties(("cpu",), ("cpu",)), "rank 0 of p0 has room for 20 GB of 30 GB"),
        (
            parties(("cpu",), ("cpu",), locality=Locality(host="b/1"), reports={1: {"locality": Locality(host="b/2")}}),
            "rank 0 of p0 has room for 20 GB of 30 GB",
        ),
        (
            parties(("cpu",), ("cpu",), locality=Locality(host="b/1"), reports={1: {"locality": Locality(host="c/1")}}),
            None,
        ),
    ],
)
def test_a_version_is_staged_only_where_every_rank_has_verified_all_of_it_and_has_room(
    made: Parties, obstacle: str | None
):
    choice = choose(made)
    assert choice.staged is (obstacle is None)
    assert choice.reason.partition("; not staged, for ")[2] == (obstacle or "")


def test_room_is_no_question_where_the_second_buffers_are_held_already():
    made = parties(("GPU-0",), layouts={0: (layout(room_bytes=5 * GB),)})
    assert not choose(made).staged
    assert choose(made, held=True).staged


def test_engines_that_share_a_gpu_share_its_room_whatever_their_namespaces():
    host_memory = CPU_TRAINER | {"locality": Locality(host="b/3", memory="b/9")}
    made = parties(
        ("GPU-0",),
        ("GPU-0",),
        trainer=host_memory,
        reports={number: {"locality": Locality(host=f"b/{number}", memory="b/9")} for number in range(2)},
    )
    choice = choose(made)
    assert choice.transport is Transport.COLOCATED
    assert choice.reason.endswith("not staged, for rank 0 of p0 has room for 20 GB of 30 GB")


def test_a_gpu_that_occurs_twice_is_told_when_nothing_else_fits():
    problem = refuse(parties(("GPU-0",), ("GPU-0",)), Transport.AUTO)
    assert "NCCL takes every GPU once, and GPU-0 is that of rank 0 of p0 and of rank 0 of p1" in problem.message
    assert problem.message.count("NCCL takes every GPU once") == 1


def test_nothing_is_staged_against_the_policy_or_by_whole_broadcasts():
    assert not choose(parties(("GPU-0",)), staging=Staging.NEVER).staged
    assert not choose(parties(("GPU-0",)), Transport.NATIVE).staged


def test_a_trainer_without_a_gpu_reaches_engines_on_gpus_through_the_memory_of_the_hosts():
    engines = parties(("GPU-0", "GPU-1"), ("GPU-2", "GPU-3"), trainer={"devices": ("cpu",), "nccl_version": ""})
    why = "trainer t has no GPU for NCCL, so all bytes pass through the memory of the hosts"
    chosen = choose(engines)
    assert (chosen.transport, chosen.wire) == (Transport.LAYOUT, Wire.GLOO)
    assert chosen.reason == f"Layout over Gloo: trainer and engines share no memory; {why}"
    assert choose(engines, Transport.LAYOUT).reason == f"Layout over Gloo: the policy says so; {why}"


def test_a_trainer_whose_tensors_lie_in_host_memory_sends_over_nccl_where_it_has_a_gpu():
    assert choose(parties(("GPU-0",), trainer={"devices": ("cpu",)})).wire is Wire.NCCL


def test_what_is_to_be_verified_in_full_is_not_staged():
    policy = RefitPolicy(transport=Transport.LAYOUT, verify=Verify.FULL)
    chosen = choose_transport(policy, parties(("cpu",), ("cpu",)))
    assert isinstance(chosen, Choice)
    assert not chosen.staged
    assert chosen.reason.endswith("not staged, for refit.verify Full needs engines that stand still")
