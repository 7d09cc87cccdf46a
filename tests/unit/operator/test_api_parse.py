"""Reading objects: what a fleet may say, and every fault in one message."""

import pytest

from rolloutfleet.contract.policy import Staging, Transport
from rolloutfleet_operator.api.parse import parse_fleet_spec, parse_fleet_status, parse_weightsync_spec
from rolloutfleet_operator.errors import InvalidSpecError


@pytest.mark.row("A01")
def test_a_fleet_is_described_by_name_shape_and_engine_configuration(make_body):
    spec = parse_fleet_spec(
        make_body(
            replicas=4,
            parallelism={"tensor": 2},
            engine={"image": "mine:1", "args": {"max-num-seqs": "8"}, "env": [{"name": "A", "value": "1"}]},
            placement={"gpuResource": "nvidia.com/gpu"},
        )
    )
    assert (spec.replicas, spec.parallelism.tensor, spec.engine.image) == (4, 2, "mine:1")
    assert spec.engine.args == {"max-num-seqs": "8"}


@pytest.mark.row("A02", "A03")
@pytest.mark.parametrize(("replicas", "tensor", "world"), [(1, 1, 1), (3, 2, 6), (1000, 64, 64000), (0, 8, 0)])
def test_world_size_is_derived_and_always_divides_by_the_tensor_parallel_size(make_spec, replicas, tensor, world):
    spec = make_spec(replicas=replicas, parallelism={"tensor": tensor})
    assert spec.world_size == world
    assert spec.world_size % spec.parallelism.tensor == 0


@pytest.mark.row("A09")
def test_all_faults_are_told_at_once_with_what_was_given():
    with pytest.raises(InvalidSpecError) as caught:
        parse_fleet_spec({"spec": {"replicas": -1, "parallelism": {"tensor": 65}}})
    assert caught.value.message == (
        "spec.model: Field required; spec.parallelism.tensor: Input should be less than or equal to 64; "
        "spec.replicas: Input should be greater than or equal to 0 (given below spec: parallelism, replicas)"
    )


def test_a_fleet_without_spec_names_what_is_missing():
    with pytest.raises(InvalidSpecError, match=r"spec\.model: Field required \(given below spec: nothing\)"):
        parse_fleet_spec({})


def test_a_shadowed_argument_is_refused_with_the_field_to_set(make_body):
    with pytest.raises(
        InvalidSpecError, match=r"engine\.args\.dtype is not for users to set: set spec\.model\.dtype instead"
    ):
        parse_fleet_spec(make_body(engine={"args": {"dtype": "half"}}))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max-lora-rank", r"set spec\.engine\.lora instead"),
        ("lora-modules", r"adapters come from the trainer, by Fleet\.refit_adapter\(\), so remove it"),
    ],
)
def test_an_argument_about_adapters_is_refused_with_the_way_to_them(make_body, name, advice):
    with pytest.raises(InvalidSpecError, match=rf"engine\.args\.{name} is not for users to set: {advice}"):
        parse_fleet_spec(make_body(engine={"args": {name: "1"}}))


def test_a_rank_that_vllm_does_not_know_is_refused(make_body):
    with pytest.raises(InvalidSpecError, match=r"engine\.lora\.maxRank: Input should be less than or equal to 512"):
        parse_fleet_spec(make_body(engine={"lora": {"maxRank": 513}}))


def test_a_variable_that_would_bypass_refits_is_refused(make_body):
    with pytest.raises(InvalidSpecError, match=r"engine\.env: VLLM_SERVER_DEV_MODE is not for users to set: it opens"):
        parse_fleet_spec(make_body(engine={"env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}]}))


@pytest.mark.parametrize(
    ("refit", "transport", "staging"),
    [
        ({}, Transport.AUTO, Staging.AUTO),
        ({"transport": "Layout", "staging": "Never"}, Transport.LAYOUT, Staging.NEVER),
        ({"transport": "Native"}, Transport.NATIVE, Staging.AUTO),
    ],
)
def test_the_sync_job_is_told_transport_and_staging_and_chooses_itself_unless_they_are_given(
    make_spec, refit, transport, staging
):
    policy = make_spec(refit=refit).refit_policy
    assert (policy.transport, policy.staging) == (transport, staging)


def test_suspended_fleets_want_no_engines(make_spec):
    assert make_spec(replicas=3, suspend=True).engines == 0


def test_unknown_fields_are_dropped_as_the_api_server_drops_them(make_body):
    parse_fleet_spec(make_body(tomorrow=1))
    assert parse_fleet_status({"status": {"tomorrow": 1}}).replicas == 0


def test_a_weightsync_needs_a_fleet():
    with pytest.raises(InvalidSpecError, match=r"spec\.fleetRef: Field required \(given below spec: floor\)"):
        parse_weightsync_spec({"spec": {"floor": {}}})
