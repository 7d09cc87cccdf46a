"""What every API model shares, and annotations that become part of the structural schema."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}

Quantity = Annotated[int | str, WithJsonSchema(INT_OR_STRING)]
"""A Kubernetes quantity: ``2``, ``"500m"``, ``"16Gi"``."""

Opaque = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]
"""A part of the pod API that is passed through; the API server checks it when the pod is made."""

ShortText = Annotated[str, Field(max_length=256)]
LongText = Annotated[str, Field(max_length=4096)]


class ApiModel(BaseModel):
    """A frozen API object; unknown fields are dropped, as the API server drops them."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    def body(self) -> dict[str, Any]:
        """The object as the API server takes it: camel case, without empty optional fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def cel(rule: str, message: str, *, expression: str = "", path: str = "") -> dict[str, str]:
    """One ``x-kubernetes-validations`` entry; ``expression`` builds a message that names the values."""
    entry = {"rule": rule, "message": message}
    if expression:
        entry["messageExpression"] = expression
    if path:
        entry["fieldPath"] = path
    return entry


def schema(**extra: Any) -> dict[str, Any]:
    """Schema keywords of a field: ``validations`` and ``list_type``, ``list_map_keys`` in Kubernetes' own spelling."""
    spelled = {
        "validations": "x-kubernetes-validations",
        "list_type": "x-kubernetes-list-type",
        "list_map_keys": "x-kubernetes-list-map-keys",
        "max_properties": "maxProperties",
    }
    return {spelled.get(key, key): value for key, value in extra.items()}
