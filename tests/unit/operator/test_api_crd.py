"""The CRDs: what is committed is what the models say, and it is fit for an API server."""

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, Field

from rolloutfleet_operator.api.arguments import (
    ARGUMENT_PATTERN,
    RESERVED_ENV,
    SHADOWED,
    argument_faults,
    environment_faults,
)
from rolloutfleet_operator.api.crd import fleet_crd, weightsync_crd
from rolloutfleet_operator.api.generate import crd_files, main
from rolloutfleet_operator.api.structural import SchemaError, structural_schema

CRDS = Path(__file__).parents[3] / "crds"


def schemas(crd):
    (version,) = crd["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"]


def walk(node, path=""):
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from walk(node[key], f"{path}[]")


@pytest.mark.parametrize("name", sorted(crd_files()))
def test_committed_files_are_what_the_models_say(name):
    assert (CRDS / name).read_text() == crd_files()[name]


def test_check_tells_a_stale_file_from_a_current_one(tmp_path, capsys):
    assert main(["--output", str(tmp_path)]) == 0
    assert main(["--output", str(tmp_path), "--check"]) == 0
    (tmp_path / "kustomization.yaml").write_text("other")
    assert main(["--output", str(tmp_path), "--check"]) == 1
    assert "kustomization.yaml is not what the models say" in capsys.readouterr().err


@pytest.mark.parametrize("crd", [fleet_crd(), weightsync_crd()], ids=["fleet", "weightsync"])
class TestBothCrds:
    def test_every_field_is_described_by_its_own_name(self, crd):
        for section in ("spec", "status"):
            for path, node in walk(schemas(crd)[section]):
                for name, child in node.get("properties", {}).items():
                    assert child["description"].startswith(f"{name} "), f"{path}.{name}"

    def test_schema_is_structural(self, crd):
        forbidden = {"$ref", "title", "allOf", "oneOf", "const", "$defs", "exclusiveMinimum"}
        for path, node in walk(schemas(crd)["spec"]):
            assert not forbidden & set(node), path
            assert "type" in node or node.get("x-kubernetes-int-or-string"), path

    def test_texts_lists_and_maps_are_bounded_so_that_rules_stay_cheap(self, crd):
        for path, node in walk(schemas(crd)["spec"]):
            if node.get("type") == "string" and "enum" not in node:
                assert "maxLength" in node, path
            if node.get("type") == "array":
                assert {"maxItems", "x-kubernetes-list-type"} <= set(node), path
            if isinstance(node.get("additionalProperties"), dict):
                assert "maxProperties" in node, path

    def test_status_gets_no_defaults(self, crd):
        assert all("default" not in node for _, node in walk(schemas(crd)["status"]))

    def test_conditions_are_a_map_by_type_and_status_is_a_subresource(self, crd):
        conditions = schemas(crd)["status"]["properties"]["conditions"]
        assert conditions["x-kubernetes-list-type"] == "map"
        assert conditions["x-kubernetes-list-map-keys"] == ["type"]
        assert "status" in crd["spec"]["versions"][0]["subresources"]

    def test_fits_client_side_apply(self, crd):
        assert len(yaml.safe_dump(crd)) < 262_144


def test_objects_are_filled_in_and_lists_are_not():
    spec = schemas(fleet_crd())["spec"]["properties"]
    assert spec["parallelism"]["default"] == {}
    assert spec["parallelism"]["properties"]["tensor"]["default"] == 1
    assert "default" not in spec["engine"]["properties"]["env"]
    assert "default" not in spec["model"]
    assert "default" not in spec["model"]["properties"]["source"]


def test_scale_counts_engines_by_their_leaders():
    scale = fleet_crd()["spec"]["versions"][0]["subresources"]["scale"]
    assert scale == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.labelSelector",
    }


def test_every_shadowed_argument_has_a_rule_that_says_what_to_do():
    rules = schemas(fleet_crd())["spec"]["properties"]["engine"]["properties"]["args"]["x-kubernetes-validations"]
    messages = {rule["message"]: rule["rule"] for rule in rules}
    for name, advice in SHADOWED.items():
        rule = messages[f"engine.args.{name} is not for users to set: {advice}"]
        assert rule == f"!self.exists(key, key == '{name}' || key.startsWith('{name}.'))"


def test_every_reserved_variable_has_a_rule_that_says_why():
    env = schemas(fleet_crd())["spec"]["properties"]["engine"]["properties"]["env"]
    rules = env["items"]["properties"]["name"]["x-kubernetes-validations"]
    messages = {rule["rule"]: rule["message"] for rule in rules}
    for name, advice in RESERVED_ENV.items():
        assert messages[f"self != '{name}'"] == f"engine.env: {name} is not for users to set: {advice}"


@pytest.mark.parametrize("name", sorted(SHADOWED))
def test_a_shadowed_argument_is_refused_whole_and_dotted(name):
    assert re.match(ARGUMENT_PATTERN, name)
    assert argument_faults([name]) == [f"engine.args.{name} is not for users to set: {SHADOWED[name]}"]
    (fault,) = argument_faults([f"{name}.backend"])
    assert fault == (f"engine.args.{name}.backend (vLLM reads it as {name}) is not for users to set: {SHADOWED[name]}")


@pytest.mark.parametrize(
    "name",
    [
        "block-size",
        "compilation-config.level",
        "enable-expert-parallel",
        "enforce-eager",
        "gpu-memory-utilization",
        "hf-overrides.num_layers",
        "kv-cache-dtype",
        "kv-events-config",
        "max-num-seqs",
        "quantization",
        "tokenizer",
    ],
)
def test_other_arguments_pass(name):
    assert argument_faults([name]) == []


@pytest.mark.parametrize("name", ["gpu_memory_utilization", "--port", "Port", "a--b", "max_model_len", "port\n"])
def test_spellings_that_could_hide_a_shadowed_argument_are_refused(name):
    (fault,) = argument_faults([name])
    assert fault.startswith(f"engine.args.{name}: names are lower-case words joined by dashes")


@pytest.mark.parametrize("name", ["tensor-par", "tensor-par.x"])
def test_an_abbreviation_is_seen_for_what_vllm_takes_it(name):
    (fault,) = argument_faults([name])
    assert fault.startswith(f"engine.args.{name} (vLLM reads it as tensor-parallel-size) is not for users to set: ")
    assert fault.endswith("set spec.parallelism.tensor instead")


def test_variables_that_would_bypass_refits_are_refused_and_others_pass():
    assert environment_faults(["NCCL_DEBUG", "VLLM_LOGGING_LEVEL"]) == []
    ours, vllms = environment_faults(["VLLM_PLUGINS", "ROLLOUTFLEET_MODEL"])
    assert ours == (
        "engine.env: ROLLOUTFLEET_MODEL begins with ROLLOUTFLEET_, which belongs to the operator; choose another name"
    )
    assert vllms == (
        "engine.env: VLLM_PLUGINS is not for users to set: "
        "it would leave out the plugin that receives weights, so remove it"
    )


def test_a_field_without_its_name_in_the_description_is_an_error():
    class Model(BaseModel):
        size: int = Field(description="How big it is.")

    with pytest.raises(SchemaError, match=r"Model\.size: the description must begin with 'size'"):
        structural_schema(Model, defaults=True)


def test_a_union_is_an_error():
    class Model(BaseModel):
        size: int | str = Field(description="size is how big it is.")

    with pytest.raises(SchemaError, match="a union of 2 types is not structural"):
        structural_schema(Model, defaults=True)
