"""Ranks, and what keeps parties from forming a group or publishing a version."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.engine import FakeEngine
from rolloutfleet.contract.manifest import ManifestFaults
from rolloutfleet.contract.members import Member
from rolloutfleet.contract.policy import Wire
from rolloutfleet.contract.problems import ProblemCode
from rolloutfleet.contract.trainer import OpenSession
from rolloutfleet.contract.worker import Rendezvous
from rolloutfleet_sync.protocol.ledger import (
    describe_faults,
    find_environment_mismatch,
    find_ledger_mismatch,
    name_some,
    plan_seats,
    world_size,
)


def member(engine: int, ranks: int = 1) -> Member:
    return Member(engine=engine, pod_name=f"p{engine}", pod_uid=f"u{engine}", address="10.0.0.1", ranks=ranks)


def opened(**fields: object) -> OpenSession:
    return OpenSession.model_validate({"trainer": "t", "rendezvous": Rendezvous(host="10.1.1.1", port=1)} | fields)


def ledger(*environments: dict[str, str], nccl: tuple[str, ...] = ("", "", "")):
    members = [member(engine) for engine in range(len(environments))]
    engines = [
        FakeEngine(m, instance="i", environment=environment, nccl_version=nccl[m.engine])
        for m, environment in zip(members, environments, strict=True)
    ]
    seats = plan_seats(members, {m.pod_uid: "i" for m in members}, trainer_ranks=1)
    return seats, {engine.member.pod_uid: engine.report() for engine in engines}


@pytest.mark.scenario("F13")
@given(st.lists(st.integers(1, 8), min_size=1, max_size=12), st.integers(1, 16), st.randoms())
def test_ranks_are_a_permutation_by_engine_whatever_the_order_of_the_roster(ranks, trainer_ranks, random):
    members = [member(engine, count) for engine, count in enumerate(ranks)]
    random.shuffle(members)
    seats = plan_seats(members, {m.pod_uid: "i" for m in members}, trainer_ranks)
    assert [seat.engine for seat in seats] == list(range(len(ranks)))
    taken = [seat.offset + rank for seat in seats for rank in range(seat.ranks)]
    assert [*range(trainer_ranks), *taken] == list(range(world_size(seats, trainer_ranks)))


@pytest.mark.parametrize(
    ("environments", "trainer", "words"),
    [
        (({"GLOO_X": "1"}, {"GLOO_X": "1"}), {"GLOO_X": "1"}, None),
        (({"NCCL_P2P_DISABLE": "1"}, {}), {}, None),
        (({"GLOO_SOCKET_IFNAME": "eth0"}, {"GLOO_SOCKET_IFNAME": "ens5"}), {}, None),
        (({"GLOO_X": "1"}, {"GLOO_X": "2"}), {"GLOO_X": "2"}, "GLOO_X is '1' on p0 but '2' on p1, trainer"),
        (({"GLOO_X": "1"}, {"GLOO_X": "1"}), {}, "GLOO_X is '1' on p0, p1 but unset on trainer"),
    ],
)
def test_only_variables_that_change_the_wire_are_compared(environments, trainer, words):
    problem = find_environment_mismatch(*ledger(*environments), opened(environment=trainer), Wire.GLOO)
    if words is None:
        assert problem is None
    else:
        assert problem is not None
        assert words in problem.message


def test_variables_of_a_group_do_not_matter_where_memory_is_shared():
    lines = ledger({"GLOO_X": "1", "NCCL_X": "1"}, {}, nccl=("2.28", "2.30"))
    assert find_environment_mismatch(*lines, opened(), Wire.MEMORY) is None


@pytest.mark.scenario("F35")
@pytest.mark.parametrize("name", ["NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"])
def test_the_devices_of_a_host_may_have_other_names_than_those_of_another(name: str):
    environments = ({name: "=mlx5_0:1"}, {name: "=mlx5_4:1"})
    assert find_environment_mismatch(*ledger(*environments, nccl=("2.28", "2.28")), opened(), Wire.NCCL) is None


def test_nccl_versions_must_be_equal_over_nccl():
    lines = ledger({}, {}, nccl=("2.28", "2.28"))
    assert find_environment_mismatch(*lines, opened(), Wire.NCCL) is None
    problem = find_environment_mismatch(*lines, opened(nccl_version="2.30"), Wire.NCCL)
    assert problem is not None
    assert "the NCCL version is '2.28' on p0, p1 but '2.30' on trainer" in problem.message
    assert find_environment_mismatch(*lines, opened(nccl_version="2.30"), Wire.GLOO) is None


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"contract_version": 1}, ProblemCode.CONTRACT_MISMATCH, "p1 speaks contract version 1, the sync job 2"),
        ({"ranks": 4}, ProblemCode.WORLD_SIZE_MISMATCH, "p1 has 4 ranks, the roster says 1"),
    ],
)
def test_a_member_that_does_not_fit_is_named(change, code, words):
    seats, reports = ledger({}, {})
    reports["u1"] = reports["u1"].model_copy(update=change)
    problem = find_ledger_mismatch(seats, reports, opened())
    assert problem is not None
    assert (problem.code, problem.member) == (code, "p1")
    assert words in problem.message


@pytest.mark.scenario("F21")
def test_the_groups_world_size_is_compared_with_the_trainers():
    problem = find_ledger_mismatch(*ledger({}, {}), opened(world_size=9))
    assert problem is not None
    assert "counts a world of 9, the group has 3: 2 workers and 1 trainer rank;" in problem.message
    assert find_ledger_mismatch(*ledger({}, {}), opened(world_size=6, ranks=4)) is None
    problem = find_ledger_mismatch(*ledger({}, {}), opened(world_size=3, ranks=4))
    assert problem is not None
    assert "counts a world of 3, the group has 6: 2 workers and 4 trainer ranks;" in problem.message


def test_equal_faults_are_told_once_for_all_engines():
    seats, _ = ledger({}, {}, {})
    same = ManifestFaults(missing=("w",))
    problem = describe_faults(3, {"u0": same, "u1": ManifestFaults(extra=("x",)), "u2": same}, seats)
    assert "3 of 3 engines: p1: extra: x | p0, p2: missing: w;" in problem.message
    assert problem.member == ""


def test_long_lists_of_names_end_in_a_count():
    assert name_some(["b", "a"]) == "a, b"
    assert name_some([f"p{i}" for i in range(10)]) == "p0, p1, p2, p3, p4, p5, p6, p7 and 2 more"
