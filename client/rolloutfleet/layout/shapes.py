"""A digest of tensors' shapes: who has equal ones can take each other's tensors byte by byte."""

import hashlib
from collections.abc import Iterable, Sequence

from rolloutfleet.contract.manifest import repeated_names


def shape_digest(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> str:
    """Hex SHA-256 of names, dtypes and shapes, whatever their order.

    Raises ValueError when a name is repeated.
    """
    lines = [(name, dtype, list(shape)) for name, dtype, shape in tensors]
    repeated = sorted(repeated_names([name for name, _, _ in lines]))
    if repeated:
        raise ValueError(f"these tensors are named more than once: {', '.join(repeated)}")
    return hashlib.sha256(
        "\n".join(f"{name} {dtype} {shape}" for name, dtype, shape in sorted(lines)).encode()
    ).hexdigest()
