"""pydantic model -> structural schema of a CRD.

The conversions are few: references are inlined, titles dropped, ``X | None`` becomes an optional ``X``, objects that a model fills in get
the default ``{}`` so that the API server fills in what is inside, integers get a format. A field without a description that begins with
its own JSON name is an error.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_INT32_MAX = 2**31 - 1
_PRESERVE = "x-kubernetes-preserve-unknown-fields"
_INT_OR_STRING = "x-kubernetes-int-or-string"
_DROPPED = frozenset({"title", "$defs", "additionalProperties", "properties", "items", "required", "default", "anyOf"})


class SchemaError(Exception):
    """A model that cannot become a structural schema; names the field and the rule."""


def structural_schema(model: type[BaseModel], *, defaults: bool) -> Schema:
    """The structural schema of ``model``; without ``defaults`` (status) the API server fills in nothing.

    Raises:
        SchemaError: a field has no fitting description, or a union that a structural schema cannot say.
    """
    raw = model.model_json_schema(by_alias=True, mode="validation")
    return _Converter(raw.get("$defs", {}), defaults=defaults).convert(raw, model.__name__)


class _Converter:
    def __init__(self, definitions: Mapping[str, Schema], *, defaults: bool) -> None:
        self._definitions = definitions
        self._defaults = defaults

    def convert(self, node: Schema, path: str) -> Schema:
        node, _ = self._resolve(node, path)
        result = {key: value for key, value in node.items() if key not in _DROPPED}
        if node.get(_INT_OR_STRING):
            return result | {"anyOf": node["anyOf"]}
        kind = node.get("type")
        if kind is None:
            raise SchemaError(f"{path}: a structural schema needs one type")
        if kind == "integer":
            result["format"] = "int32" if node.get("maximum", 2**63) <= _INT32_MAX else "int64"
        if kind == "number":
            result["format"] = "double"
        if kind == "array":
            result["items"] = self.convert(node["items"], f"{path}[]")
        if kind == "object":
            result |= self._object(node, path)
        if self._defaults and node.get("default") not in (None, [], {}):
            result["default"] = node["default"]
        return result

    def _object(self, node: Schema, path: str) -> Schema:
        parts: Schema = {}
        values = node.get("additionalProperties")
        if isinstance(values, dict):
            parts["additionalProperties"] = self.convert(values, f"{path}{{}}")
        elif values is True and "properties" in node:
            parts[_PRESERVE] = True
        if properties := node.get("properties"):
            required = set(node.get("required", ()))
            parts["properties"] = {
                name: self._property(name, child, f"{path}.{name}", required=name in required)
                for name, child in properties.items()
            }
            if required:
                parts["required"] = sorted(required)
        return parts

    def _property(self, name: str, child: Schema, path: str, *, required: bool) -> Schema:
        resolved, nullable = self._resolve(child, path)
        description = child.get("description", "")
        if not description.startswith((f"{name} is ", f"{name} ")):
            raise SchemaError(f"{path}: the description must begin with {name!r}, not {description[:40]!r}")
        converted = self.convert(child, path)
        filled_in = resolved.get("type") == "object" and "properties" in resolved and not required and not nullable
        if self._defaults and filled_in:
            converted["default"] = {}
        return converted

    def _resolve(self, node: Schema, path: str) -> tuple[Schema, bool]:
        """The node with its reference inlined, and whether null was one of its types."""
        nullable = False
        while True:
            if "$ref" in node:
                target = self._definitions[node["$ref"].rsplit("/", 1)[-1]]
                node = target | {key: value for key, value in node.items() if key != "$ref"}
            elif "anyOf" in node and not node.get(_INT_OR_STRING):
                choices = [choice for choice in node["anyOf"] if choice.get("type") != "null"]
                if len(choices) != 1:
                    raise SchemaError(f"{path}: a union of {len(choices)} types is not structural")
                nullable = nullable or len(choices) < len(node["anyOf"])
                node = choices[0] | {key: value for key, value in node.items() if key not in ("anyOf", "default")}
            else:
                return node, nullable
