"""What the judge of chaos runs sees in answers, and how faults are dealt."""

import pytest
from benchmarks.chaos.faults import BLOCK, Kind, Who, deal, parse_card, policy_of
from benchmarks.chaos.judge import Answer, judge_answers, seconds_to_serving

from rolloutfleet.contract.trainer import Phase

VERSIONS = {"zero": 0, "one": 1, "two": 2}
PUBLISHED = {1: 10.0, 2: 20.0}


def answer(at: float, said: str, *, engine: int = 0, version: int | None = None) -> Answer:
    named = VERSIONS[said] if version is None else version
    return Answer(asked=at - 0.01, answered=at, engine=engine, version=named, said=said, refusal="")


def refusal(at: float) -> Answer:
    return Answer(at - 0.01, at, 0, -1, "", "engine does not generate now")


def faults(*answers: Answer, **options) -> list[str]:
    return judge_answers(answers, VERSIONS, PUBLISHED, **options).faults


def test_whole_published_rising_versions_are_right():
    verdict = judge_answers([answer(5, "zero"), refusal(9), answer(11, "one"), answer(21, "two")], VERSIONS, PUBLISHED)
    assert (verdict.faults, verdict.answers, verdict.refusals, verdict.crossings) == ([], 3, 1, 0)


def test_weights_of_no_version_are_a_fault():
    assert "from no whole version" in faults(answer(15, "mixed", version=1))[0]


def test_a_version_served_before_its_record_is_a_fault():
    assert "before it was published" in faults(answer(9.9, "one"))[0]


def test_a_version_that_was_never_published_is_a_fault():
    assert judge_answers([answer(99, "two")], VERSIONS, {1: 10.0}).faults


def test_an_engine_that_goes_back_is_a_fault_and_another_one_that_is_behind_is_not():
    assert faults(answer(21, "two"), answer(22, "one", engine=1)) == []
    assert "after version 2" in faults(answer(21, "two"), answer(22, "one"))[0]
    assert "after version 2" in faults(answer(22, "one"), held={0: 2})[0]


def test_a_header_may_be_ahead_of_the_weights_only_while_the_engine_changes_over():
    assert faults(answer(20.5, "one", version=2)) == []
    assert "named version 2" in faults(answer(24, "one", version=2))[0]


def test_serving_again_is_when_the_last_engine_has_answered_to_what_was_asked_since():
    answers = [answer(20.5, "two"), answer(21.5, "two"), answer(23.0, "two", engine=1), answer(24.0, "two", engine=1)]
    assert seconds_to_serving(answers, VERSIONS, [0, 1], 2, since=21.0) == pytest.approx(2.0)
    assert seconds_to_serving(answers, VERSIONS, [0, 1, 2], 2, since=21.0) is None


def test_a_run_is_dealt_again_by_its_seed_and_number():
    assert [deal(7, number, 3) for number in range(300)] == [deal(7, number, 3) for number in range(300)]
    assert [deal(7, number, 3) for number in range(20)] != [deal(8, number, 3) for number in range(20)]


def test_two_hundred_runs_meet_every_party_in_every_phase_with_a_kill():
    dealt = {(fault.kind, fault.who, fault.phase) for fault in (deal(1, number, 3) for number in range(200))}
    phases = [phase for phase in Phase if phase in {fault[2] for fault in dealt}]
    assert len(phases) == 8
    for who in (Who.TRAINER, Who.RANK, Who.LAUNCHER, Who.SYNC):
        assert {phase for kind, whom, phase in dealt if (kind, whom) == (Kind.KILL, who)} == set(phases)
    assert {kind for kind, _, _ in dealt} == set(Kind)


def test_blocks_refit_in_every_way():
    assert len({policy_of(3, block * BLOCK) for block in range(3)}) == 3


def test_a_fault_is_named_by_kind_party_and_phase():
    assert parse_card("kill,rank,Transferring") == (Kind.KILL, Who.RANK, Phase.TRANSFERRING)
    with pytest.raises(ValueError, match="'kill,cat,Transferring' is no fault: give KIND,WHO,PHASE"):
        parse_card("kill,cat,Transferring")
