"""Refits of real vLLM engines in real pods, judged by transformers' own generate() on the same weights."""

import pytest
from tests.cluster.conftest import LiveFleet

PROMPTS = ["The fleet is", "abc", "a prompt that is long enough to fill several blocks of the prefix cache " * 3]


@pytest.mark.row("A35")
@pytest.mark.row("A38")
@pytest.mark.row("A21")
@pytest.mark.scenario("F12")
@pytest.mark.scenario("F14")
@pytest.mark.scenario("F46")
def test_two_refits_in_a_row_give_transformers_tokens_on_both_engines(fleet: LiveFleet):
    pods = fleet.pods()
    assert len(pods) == 2
    for seed in (11, 12):
        answer = fleet.refit(seed=seed, prompt=PROMPTS)
        version = answer["result"]["version"]
        assert answer["result"]["members"] == [pod["metadata"]["name"] for pod in pods]
        for pod in pods:
            for prompt, tokens in answer["expected"].items():
                assert fleet.generate(pod, prompt) == (tokens, version)
    status = fleet.await_that("the commit is in the fleet's status", lambda: _weights_of(fleet, version))
    assert status["lastRefit"]["epoch"] == answer["result"]["epoch"] <= status["epoch"]
    assert {"Pausing", "Transferring", "Verifying", "Committing", "Resuming"} <= answer["result"]["seconds"].keys()


def _weights_of(fleet: LiveFleet, version: int) -> dict:
    weights = fleet.body()["status"].get("weights", {})
    return weights if weights.get("version") == version else {}


def _failed(fleet: LiveFleet, version: int) -> dict:
    last = fleet.weight_sync()["status"].get("lastRefit", {})
    return last if (last.get("version"), last.get("outcome")) == (version, "Failed") else {}


@pytest.mark.scenario("F54")
def test_live_weights_of_both_engines_have_one_digest_and_it_differs_between_versions(fleet: LiveFleet):
    first = fleet.refit(seed=21)["result"]
    second = fleet.refit(seed=22)["result"]
    again = fleet.refit(seed=21)["result"]
    assert len(first["liveDigest"]) == 64
    assert first["liveDigest"] == again["liveDigest"] != second["liveDigest"]
    assert first["digest"] == again["digest"] != second["digest"]


@pytest.mark.row("A41")
@pytest.mark.row("A53")
@pytest.mark.scenario("F52")
def test_the_prefix_cache_of_the_old_weights_is_gone_after_a_refit(fleet: LiveFleet):
    pod, prompt = fleet.pods()[0], PROMPTS[2] + "cache"
    fleet.generate(pod, prompt)
    hits = fleet.metric(pod, "vllm:prefix_cache_hits_total")
    fleet.generate(pod, prompt)
    warm = fleet.metric(pod, "vllm:prefix_cache_hits_total")
    assert warm > hits
    fleet.refit(seed=31)
    fleet.generate(pod, prompt)
    assert fleet.metric(pod, "vllm:prefix_cache_hits_total") == warm


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"drop": "model.layers.0.self_attn.k_proj.weight"}, "missing: model.layers.0.self_attn.k_proj.weight"),
        ({"add": "model.layers.0.self_attn.nonsense"}, "extra: model.layers.0.self_attn.nonsense"),
        ({"misshape": "model.norm.weight"}, "tensor model.norm.weight has shape [127], the model takes [128]"),
        (
            {"misshape": "model.layers.1.self_attn.q_proj.weight"},
            "tensor model.layers.1.self_attn.q_proj.weight has shape [128, 127], which does not fit its part of",
        ),
    ],
)
def test_a_wrong_manifest_is_named_and_the_old_weights_still_serve(fleet: LiveFleet, fault: dict, words: str):
    pod = fleet.pods()[0]
    before = fleet.generate(pod, PROMPTS[0])
    answer = fleet.refit(check=False, **fault)
    assert answer["error"] == "ManifestMismatch"
    assert words in answer["message"]
    assert fleet.generate(pod, PROMPTS[0]) == before
    assert fleet.condition("Ready")["status"] == "True"


def test_a_wrong_token_is_named_and_nothing_changes(fleet: LiveFleet):
    version = fleet.version
    answer = fleet.refit(check=False, token="not-the-token")
    assert answer["error"] == "Unauthorized"
    assert "kubectl get secret" in answer["message"]
    assert fleet.version == version


def test_a_version_that_does_not_rise_is_refused_by_both_numbers(fleet: LiveFleet):
    version = fleet.version or fleet.refit()["result"]["version"]
    answer = fleet.refit(check=False, version=version)
    assert answer["error"] == "InvalidRequest"
    assert str(version) in answer["message"]


@pytest.mark.scenario("F45")
@pytest.mark.scenario("F03")
def test_a_trainer_that_dies_half_way_leaves_no_mixture_serving_and_the_next_refit_heals(fleet: LiveFleet):
    fleet.refit(seed=41)
    published = fleet.version
    answer = fleet.refit(check=False, seed=42, die=True)
    assert answer["error"] == "exit code -9"
    failed = fleet.await_that("the refit failed", lambda: _failed(fleet, published + 1), 60)
    assert failed["phase"] == "Transferring"
    assert failed["member"] in {"trainer", *(pod["metadata"]["name"] for pod in fleet.pods())}
    assert failed["message"]
    assert fleet.version == published
    for pod in fleet.pods():
        ready = next(c for c in pod["status"]["conditions"] if c["type"] == "Ready")["status"]
        if ready == "True":
            assert fleet.generate(pod, PROMPTS[0])[1] == published
    healed = fleet.refit(seed=43, prompt=PROMPTS[:1], take_over=True)
    fleet.await_ready()
    for pod in fleet.pods():
        assert fleet.generate(pod, PROMPTS[0]) == (healed["expected"][PROMPTS[0]], healed["result"]["version"])
