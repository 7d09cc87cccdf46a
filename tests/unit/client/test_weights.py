"""What a trainer may hand over, and what is refused by name before anything is sent."""

from dataclasses import dataclass

import pytest

from rolloutfleet.weights import NamedTensors


@dataclass(frozen=True)
class FakeTensor:
    """Has of a tensor what a manifest needs."""

    shape: tuple[int, ...] = (2, 3)
    dtype: str = "torch.float32"


class Module:
    """Has of an nn.Module what is asked of one."""

    def __init__(self, parameters: dict[str, FakeTensor]) -> None:
        self._parameters = parameters

    def named_parameters(self):
        return iter(self._parameters.items())


@pytest.mark.row("A37")
@pytest.mark.parametrize(
    "form", [Module, dict, lambda parameters: list(parameters.items())], ids=["module", "mapping", "pairs"]
)
def test_modules_mappings_and_pairs_give_names_dtypes_and_shapes_in_order(form) -> None:
    tensors = NamedTensors(form({"b.weight": FakeTensor((4,), "torch.bfloat16"), "a.weight": FakeTensor()}))
    specs = tensors.manifest().tensors
    assert [(spec.name, spec.dtype, spec.shape) for spec in specs] == [
        ("b.weight", "bfloat16", (4,)),
        ("a.weight", "float32", (2, 3)),
    ]
    assert [spec for spec, _ in tensors.checked(tensors.manifest())] == list(specs)


def test_a_generator_is_refused_because_tensors_are_read_twice() -> None:
    with pytest.raises(TypeError, match="tensors is a generator, which can be read only once; pass the module itself"):
        NamedTensors((name, FakeTensor()) for name in "ab")


def test_something_else_is_refused_by_its_type() -> None:
    with pytest.raises(TypeError, match=r"tensors is a int; pass an nn\.Module, a mapping"):
        NamedTensors(5)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (
            [("w", FakeTensor(dtype="torch.complex64"))],
            "tensor w has dtype complex64; those that can be sent are bfloat16",
        ),
        (
            [("w", FakeTensor()), ("w", FakeTensor())],
            "these tensors cannot be sent: manifest names these tensors more than once: w",
        ),
        ([], "these tensors cannot be sent"),
    ],
    ids=["dtype", "repeated", "none"],
)
def test_tensors_that_cannot_be_sent_are_named(tensors, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        NamedTensors(tensors).manifest()


def test_a_sharded_tensor_is_refused_with_what_to_do() -> None:
    class Sharded(FakeTensor):
        def full_tensor(self) -> None: ...

    with pytest.raises(ValueError, match=r"tensor w is sharded .* gather it first with full_tensor\(\)"):
        NamedTensors({"w": Sharded()}).manifest()


@pytest.mark.row("A37")
def test_tensors_that_changed_since_the_manifest_are_named() -> None:
    tensors = {"a": FakeTensor(), "b": FakeTensor()}
    named = NamedTensors(tensors)
    manifest = named.manifest()
    tensors["b"] = FakeTensor((3, 3))
    with pytest.raises(
        ValueError, match=r"tensor 1 was b float32 \[2, 3\] when the refit began and is b float32 \[3, 3\] now"
    ):
        list(named.checked(manifest))
    del tensors["b"]
    with pytest.raises(ValueError, match=r"only 1 of 2 tensors came; the next is b float32 \[2, 3\]"):
        list(named.checked(manifest))
    tensors |= {"b": FakeTensor(), "c": FakeTensor()}
    with pytest.raises(ValueError, match="tensor c came after the 2 that the manifest names"):
        list(named.checked(manifest))
