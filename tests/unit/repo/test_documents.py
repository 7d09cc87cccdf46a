"""What documents show works: their Python uses the client's real names, their fleets are valid."""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import rolloutfleet
from rolloutfleet_operator.api.parse import parse_fleet_spec

ROOT = Path(__file__).parents[3]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "charts/rolloutfleet/templates/NOTES.txt"]


def blocks(language: str) -> list[Any]:
    """Fenced blocks of one language in every document, as pytest parameters."""
    found = []
    for path in sorted(DOCUMENTS):
        for number, text in enumerate(re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)):
            found.append(pytest.param(text, id=f"{path.name}-{number}"))
    return found


def fleets() -> list[Any]:
    """Every RolloutFleet that a document shows."""
    found = []
    for path in sorted(DOCUMENTS):
        pattern = r"^( *)apiVersion: rolloutfleet\.io/v1alpha1\n(?:\1.+\n)+"
        for number, match in enumerate(re.finditer(pattern, path.read_text(), re.MULTILINE)):
            text = re.sub(f"^{match[1]}", "", match[0], flags=re.MULTILINE)
            body = yaml.safe_load(re.sub(r"^(YAML|```)$.*", "", text, flags=re.MULTILINE | re.DOTALL))
            found.append(pytest.param(body, id=f"{path.name}-{number}"))
    return found


def unknown_fields(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if isinstance(value, dict) and "properties" in schema:
        for name, below in value.items():
            if name in schema["properties"]:
                yield from unknown_fields(below, schema["properties"][name], f"{path}.{name}")
            else:
                yield f"{path}.{name}"
    if isinstance(value, list):
        for below in value:
            yield from unknown_fields(below, schema.get("items", {}), f"{path}[]")


@pytest.mark.parametrize("body", fleets())
def test_a_shown_fleet_is_valid(body: dict[str, Any]):
    crd = yaml.safe_load((ROOT / "crds/rolloutfleet.io_rolloutfleets.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert list(unknown_fields(body["spec"], schema, "spec")) == []
    parse_fleet_spec(body)


def test_readme_and_notes_show_a_fleet():
    shown = {parameter.id for parameter in fleets()}
    assert shown >= {"README.md-0", "NOTES.txt-0"}


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_parses(text: str):
    assert list(yaml.safe_load_all(text))


@pytest.mark.parametrize("text", blocks("python"))
def test_python_uses_names_and_arguments_that_exist(text: str):
    for call in ast.walk(ast.parse(text)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        owner, name = ast.unparse(call.func.value), call.func.attr
        if owner not in {"rolloutfleet", "fleet"}:
            continue
        target = getattr(rolloutfleet if owner == "rolloutfleet" else rolloutfleet.Fleet, name)
        parameters = inspect.signature(target).parameters
        assert {keyword.arg for keyword in call.keywords} <= set(parameters), ast.unparse(call)
