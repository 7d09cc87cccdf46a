"""A table of every field of the API, read from the CRDs."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

_INTRODUCTION = """\
# API reference

Group `rolloutfleet.io`, version `v1alpha1`. Generated from the CRDs by `make generate`;
`kubectl explain rolloutfleet.spec` shows the same. A field is in the schema only when it works.
"""
_DEPTH = 6
"""Levels below `spec` and `status` that are worth a row; deeper ones belong to Kubernetes' own types."""


def render_api_reference(crds: Mapping[str, str]) -> str:
    """Markdown with one section for each CRD: fields of spec and status, and the rules that span fields."""
    return "\n".join([_INTRODUCTION, *(_render_kind(yaml.safe_load(crds[name])) for name in sorted(crds))])


def _render_kind(crd: Mapping[str, Any]) -> str:
    names = crd["spec"]["names"]
    version = crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    lines = [f"## {names['kind']}", "", schema.get("description", ""), ""]
    if names.get("shortNames"):
        lines += [f"Short name: {', '.join(f'`{name}`' for name in names['shortNames'])}.", ""]
    for part in ("spec", "status"):
        field = schema["properties"].get(part)
        if field is None:
            continue
        lines += [f"### {names['kind']} {part}", "", "| field | type | default | meaning |", "|---|---|---|---|"]
        lines += [_render_row(*entry) for entry in _list_fields(field, part, 0)]
        lines.append("")
    rules = list(dict.fromkeys(_list_rules(schema)))
    if rules:
        lines += [f"### {names['kind']} rules", "", *(f"- {_cell(rule)}" for rule in rules), ""]
    return "\n".join(lines)


def _list_fields(schema: Mapping[str, Any], path: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field, name in required
        if depth + 1 >= _DEPTH:
            continue
        below = field.get("items", field)
        suffix = "[]" if field.get("type") == "array" else ""
        yield from _list_fields(below, f"{path}.{name}{suffix}", depth + 1)


def _render_row(path: str, field: Mapping[str, Any], required: bool) -> str:
    default = "required" if required and "default" not in field else _default(field)
    return f"| `{path}` | {_type(field)} | {default} | {_cell(field.get('description', ''))} |"


def _type(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return " \\| ".join(f"`{value}`" for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}"
    if kind == "object" and isinstance(field.get("additionalProperties"), Mapping):
        return f"map of {_type(field['additionalProperties'])}"
    bounds = [f"{sign} {field[key]}" for key, sign in (("minimum", "≥"), ("maximum", "≤")) if key in field]
    return f"{kind} {', '.join(bounds)}".strip()


def _default(field: Mapping[str, Any]) -> str:
    if "default" not in field:
        return ""
    flat = yaml.safe_dump(field["default"], default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return f"`{flat}`"


def _list_rules(schema: Mapping[str, Any]) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield str(rule.get("message") or f"computed: {rule['messageExpression']}")
    children = [*schema.get("properties", {}).values()]
    children += [below for key in ("items", "additionalProperties") if isinstance(below := schema.get(key), Mapping)]
    for child in children:
        yield from _list_rules(child)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
