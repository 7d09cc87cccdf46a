"""One refit from this process, and the comparison of what engines then say with what transformers says."""

from collections.abc import Mapping
from typing import Any

import torch
from tests.engines.hostfleet import HostFleet, await_that
from tests.engines.tinymodels import digest_of, greedy_tokens, make_model
from transformers import PreTrainedModel

import rolloutfleet
from rolloutfleet.contract.trainer import RefitResult

PROMPTS = ("The fleet is", "abc", "a prompt that is long enough to fill several blocks of the cache " * 3)
TOKENS = 12


def refit(fleet: HostFleet, trainer: rolloutfleet.Fleet, tensors: Mapping[str, torch.Tensor]) -> RefitResult:
    """The result, after every engine has received these very bytes, which a whole broadcast proves by its digest."""
    result = trainer.refit(tensors, version=fleet.version + 1, timeout=120)
    fleet.version = result.version
    if not result.transport.by_layout:
        assert result.digest == digest_of(tensors)
    assert result.tensors == len(tensors)
    assert result.members == tuple(engine.name for engine in fleet.engines)
    return result


def told_of(fleet: HostFleet, result: RefitResult) -> dict[str, Any]:
    """What the status says of this refit; it is written after the trainer has its result."""

    def told() -> dict[str, Any] | None:
        last = fleet.status().get("lastRefit")
        return last if last and last["version"] == result.version else None

    return await_that(f"the status tells of version {result.version}", told)


def assert_generates(fleet: HostFleet, model: PreTrainedModel | int) -> None:
    """Every engine gives the tokens of this model (or of this seed), under the fleet's version."""
    if isinstance(model, int):
        model = make_model(fleet.model, model)
    for prompt in PROMPTS:
        expected = greedy_tokens(model, fleet.model, prompt, TOKENS)
        for engine in fleet.engines:
            assert engine.generate(prompt, TOKENS) == (expected, fleet.version), (engine.name, prompt)
