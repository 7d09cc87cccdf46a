"""A trainer of several ranks: they meet, do the same, end alike, and none waits for one that is gone."""

import socket
import time
from collections.abc import Iterator

import pytest

from fakes.team import SECRET, FakeSource, ThreadTeam, connected_ends
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import RefitResult
from rolloutfleet.errors import DeadlineExceeded, InvalidRequest, RefitFailed, TeamLost
from rolloutfleet.team.forming import Meeting, gather_followers, join_leader
from rolloutfleet.team.links import Link
from rolloutfleet.team.messages import Hello, Welcome, decode, describe, encode, revive

SOON = 8.0
"""Far below every deadline that these tests give: what ends within it did not wait for one."""


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadTeam]:
    made = ThreadTeam(monkeypatch)
    yield made
    made.close()


def steps_of(team: ThreadTeam, rank: int) -> list[str]:
    return [step for who, step in team.steps if who == rank]


def test_every_rank_does_every_step_and_returns_the_same_result(team: ThreadTeam) -> None:
    results = team.refit()
    assert isinstance(results[0], RefitResult)
    assert results == [results[0]] * 3
    assert [steps_of(team, rank) for rank in range(3)] == [["join", "prepare", "send"]] * 3
    assert team.fleet.told == ["joined", "prepared", "sent"]
    assert [place.device for place in team.places] == ["cpu", "cpu"]
    assert sorted(holdings.rank for holdings in team.published) == [0, 1, 2]


def test_the_group_and_what_ranks_hold_are_kept_for_the_next_refit(team: ThreadTeam) -> None:
    team.refit(version=1)
    assert all(isinstance(result, RefitResult) for result in team.refit(version=2))
    assert [steps_of(team, rank) for rank in range(3)] == [["join", "prepare", "send", "send"]] * 3
    assert (team.sessions, len(team.published)) == (1, 3)


def test_the_fleet_hears_of_a_step_only_when_the_slowest_rank_has_done_it(team: ThreadTeam) -> None:
    told_while_sending: list[str] = []

    def linger(delivery) -> None:
        delivery.ended.wait(0.3)
        told_while_sending.extend(team.fleet.told)

    team.on_send[2] = linger
    team.refit()
    assert told_while_sending == ["joined", "prepared"]
    assert team.fleet.told[-1] == "sent"


@pytest.mark.scenario("F03")
def test_a_rank_that_fails_while_sending_ends_the_refit_on_all_with_one_error(team: ThreadTeam) -> None:
    def fail(_) -> None:
        raise ArithmeticError("loss is NaN")

    team.on_send |= {0: lambda delivery: delivery.block(), 1: lambda delivery: delivery.block(), 2: fail}
    began = time.monotonic()
    errors = team.refit()
    assert time.monotonic() - began < SOON
    assert {type(error) for error in errors} == {RefitFailed}
    assert len({str(error) for error in errors}) == 1
    assert "trainer rank 2: ArithmeticError: loss is NaN" in str(errors[0])
    assert (errors[1].phase, errors[1].member) == ("Transferring", "trainer")
    assert isinstance(errors[2].__cause__, ArithmeticError)
    assert {rank for rank, step in team.steps if step == "leave"} == {0, 1, 2}
    team.on_send.clear()
    assert all(isinstance(result, RefitResult) for result in team.refit())


def test_tensors_that_one_rank_cannot_send_are_named_on_all_and_nothing_is_asked(team: ThreadTeam) -> None:
    broken = FakeSource("a", broken=ValueError("tensor w has dtype complex64"))
    errors = team.refit(FakeSource("a"), broken, FakeSource("a"))
    assert [type(error) for error in errors] == [ValueError] * 3
    assert str(errors[1]) == "tensor w has dtype complex64"
    assert str(errors[0]) == str(errors[2]) == "trainer rank 1: tensor w has dtype complex64"
    assert team.fleet.requests == []
    assert all(isinstance(result, RefitResult) for result in team.refit())


def test_tensors_that_rank_0_cannot_send_are_named_on_all(team: ThreadTeam) -> None:
    errors = team.refit(FakeSource("a", broken=ValueError("tensor w is odd")), FakeSource("a"), FakeSource("a"))
    assert [(type(error), str(error)) for error in errors] == [(ValueError, "tensor w is odd")] * 3
    assert all(isinstance(result, RefitResult) for result in team.refit())


def test_a_refused_request_is_refused_on_all_and_the_group_stays(team: ThreadTeam) -> None:
    team.refit(version=1)
    team.fleet.refuse = Problem(code=ProblemCode.STALE_VERSION, message="no")
    errors = team.refit(version=1)
    assert [type(error) for error in errors] == [InvalidRequest] * 3
    assert errors[2].problem == team.fleet.refuse
    team.fleet.refuse = None
    assert all(isinstance(result, RefitResult) for result in team.refit(version=2))
    assert "leave" not in steps_of(team, 1)


def test_ranks_that_want_different_versions_are_told_so(team: ThreadTeam) -> None:
    calls = [team.start(rank, FakeSource("a"), version) for rank, version in enumerate((4, 4, 5))]
    for call in calls:
        assert isinstance(call.exception(SOON), InvalidRequest)
        assert "trainer rank 2 refits to version 5 and rank 0 to version 4" in str(call.exception())


def test_ranks_that_know_different_tensors_send_all_of_them(team: ThreadTeam) -> None:
    team.refit(FakeSource("a", "b"), FakeSource("c"), FakeSource("b", "d"))
    (request,) = team.fleet.requests
    assert [spec.name for spec in request.manifest.tensors] == ["a", "b", "c", "d"]
    assert {cargo.manifest.digest() for cargo in team.cargoes} == {request.manifest.digest()}
    held = {holdings.rank: [piece.source for piece in holdings.pieces] for holdings in team.published}
    assert held == {0: [0, 1], 1: [2], 2: [1, 3]}


UNEQUAL = (FakeSource("a"), FakeSource("b"), FakeSource("c"))


@pytest.mark.parametrize("refusal", ["versions", "tensors", "late"])
def test_ranks_that_know_different_tensors_go_on_after_a_refit_that_never_began(team: ThreadTeam, refusal: str) -> None:
    if refusal == "versions":
        calls = [team.start(rank, source, 2 if rank == 2 else 1) for rank, source in enumerate(UNEQUAL)]
        assert {type(call.exception(SOON)) for call in calls} == {InvalidRequest}
    elif refusal == "tensors":
        team.refit(FakeSource(broken=TypeError("no tensors")), *UNEQUAL[1:])
    else:
        calls = [team.start(rank, UNEQUAL[rank], 1, 0.3) for rank in (0, 1)]
        assert {type(call.exception(SOON)) for call in calls} == {DeadlineExceeded}
        late = team.start(2, UNEQUAL[2], 1, 0.3)
        assert isinstance(late.exception(SOON), DeadlineExceeded)
    results = team.refit(*UNEQUAL, version=2)
    assert all(isinstance(result, RefitResult) for result in results)
    assert [spec.name for spec in team.fleet.requests[-1].manifest.tensors] == ["a", "b", "c"]


def test_a_manifest_that_a_failed_refit_has_shown_is_not_taken_for_a_later_one(team: ThreadTeam) -> None:
    team.refit(*UNEQUAL, version=1)
    shown = FakeSource("a"), FakeSource("x"), FakeSource("c")
    calls = [team.start(rank, source, 3 if rank == 2 else 2) for rank, source in enumerate(shown)]
    assert {type(call.exception(SOON)) for call in calls} == {InvalidRequest}
    assert all(isinstance(result, RefitResult) for result in team.refit(*UNEQUAL, version=2))
    assert [spec.name for spec in team.fleet.requests[-1].manifest.tensors] == ["a", "b", "c"]


def test_a_rank_that_describes_no_tensors_is_named(team: ThreadTeam) -> None:
    team.following[0].taken(FakeSource("b").manifest().digest())
    errors = team.refit(*UNEQUAL)
    assert [type(error) for error in errors] == [InvalidRequest] * 3
    assert "trainer rank 1 speaks of tensors" in str(errors[0])
    assert all(isinstance(result, RefitResult) for result in team.refit(*UNEQUAL))


def test_a_rank_that_holds_other_parts_than_before_begins_a_new_session(team: ThreadTeam) -> None:
    team.refit(version=1)
    moved = FakeSource("a", held=False)
    results = team.refit(FakeSource("a"), moved, FakeSource("a"), version=2)
    assert all(isinstance(result, RefitResult) for result in results)
    assert team.sessions == 2
    assert steps_of(team, 2) == ["join", "prepare", "send", "leave", "join", "prepare", "send"]


def test_tensors_that_moved_to_another_device_begin_a_new_session(team: ThreadTeam) -> None:
    team.refit(version=1)
    moved = FakeSource("a", gpu=0)
    for version in (2, 3):
        results = team.refit(moved, FakeSource("a"), FakeSource("a"), version=version)
        assert all(isinstance(result, RefitResult) for result in results)
    assert team.gpus == [None, 0]


@pytest.mark.scenario("F03")
def test_a_rank_that_dies_ends_the_refit_on_the_others_and_the_team(team: ThreadTeam) -> None:
    team.on_send |= {0: lambda delivery: delivery.block(), 1: lambda delivery: delivery.block()}
    team.on_send[2] = lambda _: team.ends[1].close()
    began = time.monotonic()
    errors = team.refit()
    assert time.monotonic() - began < SOON
    assert [type(error) for error in errors[:2]] == [RefitFailed] * 2
    assert "trainer rank 2 has ended or closed its fleet" in str(errors[0])
    with pytest.raises(TeamLost, match=r"trainer rank 2 .* make a new process group"):
        team.leading.refit(FakeSource("a"), 1, 20.0, None)


def test_a_rank_whose_rank_0_dies_leaves_the_group(team: ThreadTeam) -> None:
    team.on_send |= {1: lambda delivery: delivery.block(), 2: lambda delivery: delivery.block()}
    team.on_send[0] = lambda _: team.leading.close()
    errors = team.refit()
    assert [type(error) for error in errors[1:]] == [TeamLost] * 2
    assert "trainer rank 0" in str(errors[1])
    assert {rank for rank, step in team.steps if step == "leave"} >= {1, 2}


def test_a_rank_that_does_not_call_refit_is_named_at_the_deadline(team: ThreadTeam) -> None:
    calls = [team.start(rank, FakeSource("a"), 1, 0.5) for rank in (0, 2)]
    for call in calls:
        assert isinstance(call.exception(SOON), DeadlineExceeded)
        assert "trainer rank 1 did not call refit(version=1) in time" in str(call.exception())


def test_a_rank_that_stands_still_is_named_when_its_step_is_over(team: ThreadTeam) -> None:
    team.fleet.seconds = 0.5
    team.on_send[1] = lambda delivery: delivery.block()
    errors = team.refit()
    assert [type(error) for error in errors] == [RefitFailed] * 3
    assert "trainer rank 1 did not finish TrainerSend within 0.5 s" in str(errors[0])


def test_strangers_are_turned_away_and_absent_ranks_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stranger = Link(socket.create_connection(listening.getsockname()), 0)
        stranger.send(Hello(rank=1, secret="guess"))
        with pytest.raises(TeamLost, match="of the trainer's 3 ranks, rank 1, 2 did not connect to rank 0 in time"):
            gather_followers(listening, SECRET, 3, time.monotonic() + 0.5)
        with pytest.raises(TeamLost):
            stranger.receive(time.monotonic() + SOON)
        stranger.close()


def test_a_rank_that_finds_no_rank_0_says_where_it_looked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    meeting = Meeting(hosts=("127.0.0.1",), port=port, secret=SECRET)
    with pytest.raises(TeamLost, match=rf"trainer rank 1 did not reach rank 0 at 127\.0\.0\.1:{port} \(.*refused"):
        join_leader(meeting, 1, time.monotonic() + 0.2)


def test_a_link_goes_on_after_a_deadline_in_the_middle_of_a_message() -> None:
    leader, (end,) = connected_ends(2)
    whole = encode(Hello(rank=1, secret="x" * 100))
    sent = len(whole).to_bytes(4, "big") + whole
    connection = leader._links[1]._connection
    for cut in (2, 40):
        connection.sendall(sent[:cut])
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match="no word from trainer rank 0 in time"):
                end.hear(time.monotonic() + 0.05)
        connection.sendall(sent[cut:])
        assert end.hear(time.monotonic() + SOON) == Hello(rank=1, secret="x" * 100)
    end.close()
    leader.close()


def test_a_rank_that_is_gone_before_it_is_welcomed_costs_the_others_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = time.monotonic() + SOON
    welcome = Link.send

    def lost(link: Link, message) -> None:
        if link.peer == 1 and isinstance(message, Welcome):
            raise TeamLost("trainer rank 1 is not reached any more: broken pipe")
        welcome(link, message)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        ends = [Link(socket.create_connection(listening.getsockname()), 0) for _ in range(2)]
        for rank, end in enumerate(ends, start=1):
            end.send(Hello(rank=rank, secret=SECRET))
        monkeypatch.setattr(Link, "send", lost)
        with pytest.raises(TeamLost, match="trainer rank 1 is not reached"):
            gather_followers(listening, SECRET, 3, deadline)
    for end in ends:
        with pytest.raises(TeamLost):
            end.receive(deadline)
        end.close()


def test_something_else_than_a_message_ends_the_link() -> None:
    leader, (end,) = connected_ends(2)
    end._link._connection.sendall(b"\x00\x00\x00\x02[]")
    rank, word = leader.inbox.get(timeout=SOON)
    assert (rank, type(word)) == (1, TeamLost)
    assert "install one release of the client on all ranks" in str(word)
    end.close()
    leader.close()


@pytest.mark.parametrize(
    "error",
    [
        RefitFailed("it failed", problem=Problem(code=ProblemCode.TRANSFER_FAILED, message="m"), committed=True),
        ValueError("tensor w is odd"),
        TimeoutError("too slow"),
    ],
    ids=["client", "value", "timeout"],
)
def test_an_error_is_the_same_on_every_rank(error: Exception) -> None:
    revived = revive(decode(encode(describe(error, 3))))
    assert (type(revived), str(revived)) == (type(error), str(error))
    if isinstance(error, RefitFailed):
        assert (revived.problem, revived.committed) == (error.problem, True)


def test_an_error_that_this_process_does_not_know_becomes_a_failed_refit() -> None:
    revived = revive(describe(ArithmeticError("loss is NaN"), 1), "trainer rank 2")
    assert isinstance(revived, RefitFailed)
    assert str(revived).startswith("trainer rank 2: ArithmeticError: loss is NaN")
