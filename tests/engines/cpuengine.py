"""What vLLM's CPU build needs to hear to start quickly on a small machine."""

import sys
from pathlib import Path

CPU_ENGINE = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    # What vLLM has found out of a model's class, kept under the hash of its source: seconds for each start in a home of its own.
    "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "vllm-cache"),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
