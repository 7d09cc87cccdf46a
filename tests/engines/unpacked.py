"""A worker extension whose import, which precedes loading, keeps vLLM's CPU linears from packing their weights."""

from vllm import _custom_ops

_custom_ops._supports_onednn = False


class Unpacked:
    """Adds nothing to the worker."""
