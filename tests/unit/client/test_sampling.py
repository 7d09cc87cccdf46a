"""Sampling rules hold before anything is sent."""

import pytest

from rolloutfleet.sampling import Sampling


@pytest.mark.row("A07")
@pytest.mark.parametrize("top_k", [None, -1, 1, 50])
def test_top_k_may_be_absent_minus_one_or_at_least_one(top_k) -> None:
    assert Sampling(top_k=top_k).request_fields(greedy=False)["top_k"] == (-1 if top_k is None else top_k)


@pytest.mark.row("A07")
@pytest.mark.parametrize("top_k", [0, -2, 1.5, True, "5"])
def test_any_other_top_k_is_refused_with_value_and_rule(top_k) -> None:
    with pytest.raises(ValueError, match=rf"top_k is {top_k!r}; it must be None or -1 .* integer of at least 1"):
        Sampling(top_k=top_k)


@pytest.mark.row("A08")
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 1, 1.0])
def test_top_p_lies_above_zero_and_up_to_one(top_p) -> None:
    assert Sampling(top_p=top_p).request_fields(greedy=False)["top_p"] == top_p


@pytest.mark.row("A08")
@pytest.mark.parametrize("top_p", [0, -0.1, 1.0001, float("nan"), "0.5"])
def test_any_other_top_p_is_refused_with_value_and_rule(top_p) -> None:
    with pytest.raises(ValueError, match=rf"top_p is {top_p!r}; it must be above 0 and at most 1"):
        Sampling(top_p=top_p)


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1.0), ("temperature", float("inf")), ("max_new_tokens", 0), ("stop", "###")]
)
def test_other_parameters_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        Sampling(**{field: value})


@pytest.mark.row("A43")
def test_greedy_takes_the_most_likely_token_whatever_else_is_set() -> None:
    fields = Sampling(temperature=0.7, top_p=0.5, top_k=3, seed=7, stop=["end"], stop_token_ids=[2]).request_fields(
        greedy=True
    )
    assert (fields["temperature"], fields["top_p"], fields["top_k"]) == (0.0, 1.0, -1)
    assert (fields["seed"], fields["stop"], fields["stop_token_ids"]) == (7, ["end"], [2])
