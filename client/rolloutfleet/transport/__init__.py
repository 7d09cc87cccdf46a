"""How weights travel from the trainer's ranks to the workers; each module imports torch, and vLLM where it needs it, when first used."""
