"""Dealing out prompts and putting answers together, without a network."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutfleet.contract.policy import Transport
from rolloutfleet.contract.trainer import FleetView, MemberView, Phase
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet.errors import GenerationFailed
from rolloutfleet.fleet import engines_of
from rolloutfleet.generation import Choice, merge_texts, merge_tokens, plan_shards, read_prompts


@pytest.mark.row("A43")
@given(st.integers(0, 200), st.integers(1, 20))
def test_shards_cover_all_prompts_in_order_and_differ_by_at_most_one(prompts: int, engines: int) -> None:
    shards = plan_shards(prompts, engines)
    assert [index for shard in shards for index in shard] == list(range(prompts))
    sizes = [len(shard) for shard in shards]
    assert len(sizes) <= engines
    assert all(sizes)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def choice(tokens: list[int], engine: str = "f-0-0-0", version: int = 3) -> Choice:
    return Choice(
        text=" ".join(map(str, tokens)),
        token_ids=tuple(tokens),
        logprobs=tuple(-0.5 * token for token in tokens),
        finish_reason="length",
        engine=engine,
        weight_version=version,
    )


@pytest.mark.row("A43")
def test_answers_of_unequal_length_are_padded_behind_their_own_tokens() -> None:
    merged = merge_tokens([[1, 2, 3], [4]], [choice([5]), choice([6, 7], "f-1-0-0")], pad_token_id=9)
    assert merged == {
        "output_ids": [[1, 2, 3, 5], [4, 6, 7, 9]],
        "generation_lengths": [1, 2],
        "unpadded_sequence_lengths": [4, 3],
        "logprobs": [[0.0, 0.0, 0.0, -2.5], [0.0, -3.0, -3.5, 0.0]],
        "finish_reasons": ["length", "length"],
        "engines": ["f-0-0-0", "f-1-0-0"],
        "weight_versions": [3, 3],
    }


@pytest.mark.row("A43")
def test_an_empty_batch_is_an_empty_result() -> None:
    assert set(map(len, merge_tokens([], [], pad_token_id=0).values())) == {0}
    assert set(map(len, merge_texts([]).values())) == {0}


class Rows:
    """Stands for a tensor or an array: all that is asked of them is ``tolist``."""

    def __init__(self, rows: list) -> None:
        self._rows = rows

    def tolist(self) -> list:
        return self._rows


@pytest.mark.row("A43")
def test_prompts_come_from_lists_and_from_tensors_without_their_padding() -> None:
    assert read_prompts([[1, 2, 0], [3, 0, 0]], [2, 1]) == [[1, 2], [3]]
    assert read_prompts(Rows([[1, 2, 0], [3, 0, 0]]), Rows([2, 1])) == [[1, 2], [3]]


def test_lengths_that_do_not_fit_are_refused_by_row() -> None:
    with pytest.raises(ValueError, match=r"input_lengths\[1\] is 4; it must be from 1 to the row's 3 tokens"):
        read_prompts([[1, 2, 3], [4, 5, 6]], [3, 4])
    with pytest.raises(ValueError, match="input_ids has 2 rows and input_lengths 1"):
        read_prompts([[1], [2]], [1])


def view(*members: MemberView, endpoints: tuple[str, ...]) -> FleetView:
    return FleetView(
        fleet="f",
        namespace="default",
        fleet_uid="u",
        model="tiny",
        phase=Phase.READY,
        epoch=1,
        version=2,
        transport=Transport.GLOO,
        engines=len(members),
        members=members,
        endpoints=endpoints,
    )


def member(engine: int, *, ready: bool = True, message: str = "") -> MemberView:
    return MemberView(
        engine=engine,
        pod_name=f"f-{engine}-0-0",
        address=f"10.0.0.{engine + 1}",
        ready=ready,
        state=WorkerState.SERVING if ready else WorkerState.DIRTY,
        version=2,
        ranks=1,
        message=message,
    )


def test_engines_carry_the_names_of_their_pods() -> None:
    engines = engines_of(view(member(0), member(1), endpoints=("http://10.0.0.2:8000/",)))
    assert [(engine.name, engine.url) for engine in engines] == [("f-1-0-0", "http://10.0.0.2:8000")]


def test_a_fleet_without_ready_engines_says_what_each_is_doing() -> None:
    with pytest.raises(GenerationFailed, match="no Ready engine with version 2: f-0-0-0 is Dirty half of version 3"):
        engines_of(view(member(0, ready=False, message="half of version 3"), endpoints=()))
