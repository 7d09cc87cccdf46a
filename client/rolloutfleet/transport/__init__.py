"""How weights travel from the trainer (rank 0) to the workers; each transport imports torch, and vLLM for NCCL, when first used."""
