"""The chart's copies of the CRDs and its table of values."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path("charts/rolloutfleet")
_ANNOTATIONS = """\
metadata:
  {{- if .Values.crds.keep }}
  annotations:
    helm.sh/resource-policy: keep
  {{- end }}
"""


def render_chart_crds(crds: dict[str, str]) -> dict[Path, str]:
    """Each CRD as a template that honours ``crds.enabled`` and ``crds.keep``.

    Raises:
        ValueError: a CRD holds template marks or annotations of its own, which the template would garble.
    """
    return {CHART / "templates" / "crds" / name: _render_template(name, text) for name, text in crds.items()}


def render_chart_readme(root: Path) -> str:
    """The chart's README: how to install it, and every value with its default and meaning."""
    values = yaml.safe_load((root / CHART / "values.yaml").read_text())
    schema = json.loads((root / CHART / "values.schema.json").read_text())
    rows = [
        f"| `{name}` | `{json.dumps(default)}` | {description} |"
        for name, default, description in _list_values(values, schema, "")
    ]
    return "\n".join(
        [
            "# rolloutfleet chart",
            "",
            "Installs the rolloutfleet operator, its CRDs and its roles. See [docs/install.md](../../docs/install.md).",
            "",
            "```sh",
            "helm install rolloutfleet charts/rolloutfleet --namespace rolloutfleet-system --create-namespace",
            "helm test rolloutfleet --namespace rolloutfleet-system",
            "```",
            "",
            "## Values",
            "",
            "| value | default | meaning |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _render_template(name: str, text: str) -> str:
    metadata = yaml.safe_load(text)["metadata"]
    if "{{" in text or "annotations" in metadata or text.count("\nmetadata:\n") != 1:
        raise ValueError(f"{name}: the chart's template needs a CRD without annotations and without '{{{{'")
    body = text.replace("\nmetadata:\n", f"\n{_ANNOTATIONS}", 1)
    return f"{{{{- if .Values.crds.enabled }}}}\n{body.rstrip()}\n{{{{- end }}}}\n"


def _list_values(values: dict[str, Any], schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any, str]]:
    for name, default in values.items():
        field = schema["properties"][name]
        if field.get("properties") and isinstance(default, dict):
            yield from _list_values(default, field, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", default, field["description"]
