"""What every rank holds, compared with what was sent to it."""

from dataclasses import replace

import pytest

from fakes.simulation import MANIFEST
from rolloutfleet.contract.members import Member
from rolloutfleet.contract.policy import Transport, Wire
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import TrainerSent
from rolloutfleet.contract.worker import LayoutSummary, ReceiveReport
from rolloutfleet_sync.protocol.ledger import plan_seats
from rolloutfleet_sync.protocol.model import Choice, Refit
from rolloutfleet_sync.protocol.verification import (
    combine_sent_digests,
    describe_detours,
    find_unverified,
    layout_digests,
)


def refit(transport: Transport, ranks: int, **received: ReceiveReport) -> Refit:
    members = [
        Member(engine=int(uid[1:]), pod_name=f"p{uid[1:]}", pod_uid=uid, address="10.0.0.1", ranks=ranks)
        for uid in received
    ]
    layouts = {uid: tuple(layout(f"L{rank}") for rank in range(ranks)) for uid in received}
    return Refit(
        id="r",
        session="s",
        trainer="t",
        version=1,
        manifest=MANIFEST,
        manifest_digest="m",
        tensors=2,
        nbytes=MANIFEST.nbytes,
        seats=plan_seats(members, dict.fromkeys(received, "i"), trainer_ranks=1),
        choice=Choice(transport, Wire.GLOO, staged=False, reason=""),
        layouts=layouts,
        received=received,
    )


def layout(digest: str, *detours: str) -> LayoutSummary:
    return LayoutSummary(digest=digest, shape="s", placed_bytes=1, detoured_bytes=0, detours=detours)


def received(**change: object) -> ReceiveReport:
    good = {
        "version": 1,
        "tensors": 2,
        "nbytes": MANIFEST.nbytes,
        "received_digests": ("d",),
        "live_digests": ("l",),
        "receive_seconds": 1.0,
        "load_seconds": 1.0,
    }
    return ReceiveReport.model_validate(good | change)


def find_one(made: Refit, sent: TrainerSent) -> Problem | None:
    """The first fault."""
    return next(iter(find_unverified(made, sent).values()), None)


WHOLE = TrainerSent(epoch=1, tensors=2, nbytes=MANIFEST.nbytes, digests={"": "d"})
SLICED = TrainerSent(epoch=1, tensors=1, nbytes=3, digests={"L0": "d0", "L1": "d1"})
SLICES: dict[str, object] = {"tensors": 1, "nbytes": 5, "received_digests": ("d0", "d1"), "live_digests": ("l0", "l1")}


@pytest.mark.scenario("F53")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"version": 2}, "p1 loaded version 2, not 1"),
        ({"tensors": 1}, "p1 received 1 tensors of 38 bytes, not 2 of 38"),
        ({"nbytes": 37}, "p1 received 2 tensors of 37 bytes, not 2 of 38"),
        ({"received_digests": ("e",)}, "local rank 0 of p1 received bytes of digest e, the trainer sent it d"),
        ({"received_digests": ()}, "p1 gave 0 received digests for 1 ranks"),
        ({"live_digests": ()}, "p1 gave 0 live digests for 1 ranks"),
        ({"live_digests": ("m",)}, "local rank 0 of p1 holds live parameters of digest m, that of p0 l"),
    ],
)
def test_every_way_to_hold_something_else_than_was_broadcast_is_found(change, words):
    problem = find_unverified(refit(Transport.GLOO, 1, u0=received(), u1=received(**change)), WHOLE).get("u1")
    if words is None:
        assert problem is None
    else:
        assert problem is not None
        assert (problem.code, problem.member) == (ProblemCode.DIGEST_MISMATCH, "p1")
        assert words in problem.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"live_digests": ()}, None),
        ({"received_digests": ("d0", "d0")}, "local rank 1 of p1 received bytes of digest d0, the trainer sent it d1"),
        ({"received_digests": ("d0",)}, "p1 gave 1 received digests for 2 ranks"),
        ({"live_digests": ("l0",)}, "p1 gave 1 live digests for 2 ranks"),
        ({"live_digests": ("l0", "l0")}, "local rank 1 of p1 holds live parameters of digest l0, that of p0 l1"),
    ],
)
def test_every_rank_must_hold_what_was_sent_for_its_own_layout(change, words):
    mine, theirs = received(**SLICES), received(**SLICES | change)
    problem = find_unverified(refit(Transport.LAYOUT, 2, u0=mine, u1=theirs), SLICED).get("u1")
    if words is None:
        assert problem is None
    else:
        assert problem is not None
        assert problem.member == "p1"
        assert words in problem.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"received_digests": ("d0", "")}, "p1 gave an empty received digest for local rank 1"),
        ({"live_digests": ("", "l1")}, "p1 gave an empty live digest for local rank 0"),
    ],
)
def test_an_empty_digest_of_an_engine_never_verifies(change, words):
    problem = find_one(refit(Transport.LAYOUT, 2, u0=received(**SLICES), u1=received(**SLICES | change)), SLICED)
    assert problem is not None
    assert problem.member == "p1"
    assert words in problem.message


def test_who_differs_from_most_is_at_fault_and_everybody_where_there_is_no_majority():
    usual, other = received(), received(live_digests=("m",))
    assert find_unverified(refit(Transport.GLOO, 1, u0=other, u1=usual, u2=usual), WHOLE).keys() == {"u0"}
    assert find_unverified(refit(Transport.GLOO, 1, u0=other, u1=usual), WHOLE).keys() == {"u0", "u1"}


def test_an_empty_digest_of_the_trainer_never_verifies():
    nothing = received(received_digests=("",))
    problem = find_one(refit(Transport.GLOO, 1, u0=nothing), WHOLE.model_copy(update={"digests": {"": ""}}))
    assert problem is not None
    sent = SLICED.model_copy(update={"digests": {"L0": "d0", "L1": ""}})
    problem = find_one(refit(Transport.LAYOUT, 2, u0=received(**SLICES)), sent)
    assert problem is not None
    assert problem.member == "trainer"
    assert "the trainer gave an empty digest for layout L1 of local rank 1 of p0" in problem.message


def test_live_parameters_are_compared_only_between_ranks_of_one_layout():
    made = refit(Transport.LAYOUT, 1, u0=received(received_digests=("d0",)), u1=received(received_digests=("d1",)))
    other = replace(made, layouts={"u0": (layout("L0"),), "u1": (layout("L1"),)})
    reports = {**other.received, "u1": received(received_digests=("d1",), live_digests=("m",))}
    assert find_unverified(replace(other, received=reports), SLICED) == {}


def test_a_trainer_that_leaves_a_layout_out_is_found():
    sent = SLICED.model_copy(update={"digests": {"L0": "d0"}})
    problem = find_one(refit(Transport.LAYOUT, 2, u0=received(**SLICES)), sent)
    assert problem is not None
    assert problem.member == "trainer"
    assert "gave no digest for layout L1 of local rank 1 of p0" in problem.message


def test_a_trainer_that_broadcast_less_than_its_manifest_is_found():
    problem = find_one(refit(Transport.GLOO, 1, u0=received()), WHOLE.model_copy(update={"tensors": 1}))
    assert problem is not None
    assert problem.member == "trainer"


def test_layouts_are_listed_in_rank_order_and_not_at_all_for_whole_broadcasts():
    reports = {"u1": received(**SLICES), "u0": received(**SLICES)}
    assert layout_digests(refit(Transport.LAYOUT, 2, **reports)) == ("L0", "L1", "L0", "L1")
    assert layout_digests(refit(Transport.NATIVE, 2, **reports)) == ()


def test_the_digest_of_a_refit_depends_on_every_layouts_digest():
    assert combine_sent_digests({"": "d"}) == "d"
    both = combine_sent_digests({"L0": "d0", "L1": "d1"})
    assert both == combine_sent_digests({"L1": "d1", "L0": "d0"})
    assert (
        len({both, combine_sent_digests({"L0": "d1", "L1": "d0"}), combine_sent_digests({"L0": "d0", "L1": "x"})}) == 3
    )


def test_detours_are_told_once_and_at_most_eight_times():
    made = refit(Transport.LAYOUT, 1, u0=received(), u1=received())
    assert describe_detours(made) == ()
    sentences = [f"w{number}: why" for number in range(9)]
    layouts = {"u0": (layout("L0", *sentences),), "u1": (layout("L0", *sentences),)}
    assert describe_detours(replace(made, layouts=layouts)) == tuple(sentences[:8])
    assert "Native broadcasts whole tensors" in describe_detours(refit(Transport.NATIVE, 1, u0=received()))[0]
