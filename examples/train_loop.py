"""The whole of what a trainer does with a fleet: generate, train, refit. Run it where the engines' pods are reachable.

python examples/train_loop.py http://quickstart-sync.default.svc:8080 /var/lib/rolloutfleet/models/tiny-qwen2
"""

import logging
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rolloutfleet

logging.basicConfig(level=logging.INFO, format="%(message)s")
address, path = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampling = rolloutfleet.Sampling(max_new_tokens=16, temperature=1.0)

prompts = [tokenizer(text).input_ids for text in ("Once upon a time", "The fleet")]
lengths = [len(prompt) for prompt in prompts]
padded = [prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts]

with rolloutfleet.connect(address) as fleet:
    start = fleet.view().version
    for version in range(start + 1, start + 4):
        rollouts = fleet.generate(padded, lengths, sampling=sampling)
        tokens = torch.tensor(rollouts["output_ids"])
        # A stand-in for a reward: make the engines' own rollouts more likely.
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result = fleet.refit(model, version=version)
        print(f"version {result.version}: loss {loss.item():.3f}, engines paused {result.pause_seconds * 1000:.0f} ms")
