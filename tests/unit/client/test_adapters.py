"""What of PEFT's configuration travels, what is refused, and the key of an adapter's manifest."""

from enum import StrEnum
from types import SimpleNamespace

import pytest

from fakes.team import FakeSource, ThreadTeam
from rolloutfleet.adapters import adapter_spec
from rolloutfleet.contract.adapter import AdapterSpec, manifest_key, versioned_name
from rolloutfleet.contract.manifest import ManifestFaults
from rolloutfleet.contract.trainer import RefitResult
from rolloutfleet.errors import InvalidRequest

CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"], "bias": "none"}


class PeftType(StrEnum):
    LORA = "LORA"
    IA3 = "IA3"


def test_a_mapping_and_an_object_that_becomes_one_say_the_same():
    whole = {**CONFIG, "use_rslora": True, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {}, "inference_mode": True}
    spec = adapter_spec("style", whole)
    assert spec == AdapterSpec(
        name="style",
        rank=8,
        alpha=16,
        target_modules=("q_proj", "v_proj"),
        use_rslora=True,
        rank_pattern={"q_proj": 4},
    )
    given = {**whole, "peft_type": PeftType.LORA, "target_modules": {"q_proj", "v_proj"}}
    assert adapter_spec("style", SimpleNamespace(to_dict=lambda: given)) == spec
    assert {key: spec.peft_config()[key] for key in ("peft_type", "r", "bias")} == {
        "peft_type": "LORA",
        "r": 8,
        "bias": "none",
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base weights"),
        ({"peft_type": PeftType.IA3}, "peft_type is IA3"),
        ({"layer_replication": [[0, 4]], "lora_bias": True}, "layer_replication is .*; lora_bias is True"),
        ({"r": None}, "config lacks r"),
        ({"r": 0}, "rank: Input should be greater than or equal to 1"),
    ],
)
def test_what_engines_would_not_compute_is_refused_before_anything_is_sent(change, words):
    with pytest.raises(ValueError, match=f"^adapter style: .*{words}"):
        adapter_spec("style", CONFIG | change)


@pytest.mark.parametrize("start", [True, False, "gaussian", "true"])
def test_ways_to_begin_that_leave_the_base_alone_are_taken(start):
    assert adapter_spec("style", CONFIG | {"init_lora_weights": start}).rank == 8


@pytest.mark.parametrize("name", ["", "a/b", "..", "-a", "a b", "a" * 64, "style-v3"])
def test_a_name_that_cannot_be_a_folder_or_looks_like_a_version_is_refused(name):
    with pytest.raises(ValueError, match="a name"):
        adapter_spec(name, CONFIG)


def test_something_else_is_no_configuration():
    with pytest.raises(TypeError, match=r"config is a int; pass a peft\.LoraConfig"):
        adapter_spec("style", 8)


def test_a_manifest_is_kept_under_another_key_for_each_adapter():
    first, second = adapter_spec("style", CONFIG), adapter_spec("style", CONFIG | {"lora_alpha": 32})
    keys = {manifest_key("digest", adapter) for adapter in (None, first, second)}
    assert len(keys) == 3
    assert "digest" in keys
    assert manifest_key("digest", AdapterSpec.model_validate_json(first.model_dump_json(by_alias=True))) in keys
    assert versioned_name("style", 12) == "style-v12"


def test_faults_of_an_adapter_are_told_first():
    faults = ManifestFaults(adapter=("adapter style has rank 16",), extra=("x",))
    assert faults
    assert faults.sentence() == "adapter style has rank 16; extra: x"


def test_ranks_that_give_different_adapters_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    team = ThreadTeam(monkeypatch)
    try:
        given = [adapter_spec("style", CONFIG), adapter_spec("style", CONFIG), None]
        for call in [team.start(rank, FakeSource("a"), adapter=adapter) for rank, adapter in enumerate(given)]:
            error = call.exception(8.0)
            assert isinstance(error, InvalidRequest)
            assert 'trainer rank 2 refits all weights and rank 0 adapter {"name":"style","rank":8' in str(error)
        given[2] = given[0]
        for call in [team.start(rank, FakeSource("a"), adapter=adapter) for rank, adapter in enumerate(given)]:
            assert isinstance(call.result(30), RefitResult)
    finally:
        team.close()
