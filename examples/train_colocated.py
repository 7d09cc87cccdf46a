"""A trainer on the engines' own devices: they sleep while it trains, and copy the new weights out of its memory.

python examples/train_colocated.py http://quickstart-sync.default.svc:8080 /var/lib/rolloutfleet/models/tiny-qwen2

The fleet's engines run with `enable-sleep-mode` in `engine.args`, which takes a GPU; on CPUs they stay awake. For the copy this process and
the engines share an IPC namespace; where they do not, the fleet takes another transport and says why.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rolloutfleet

address, path = sys.argv[1:3]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
sleeps = device.type == "cuda"
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampling = rolloutfleet.Sampling(max_new_tokens=16, temperature=1.0)
prompt = tokenizer("Once upon a time").input_ids

with rolloutfleet.connect(address) as fleet:
    start = fleet.view().version
    for version in range(start + 1, start + 4):
        rollouts = fleet.generate([prompt] * 8, [len(prompt)] * 8, sampling=sampling)
        if sleeps:
            # Level 2 drops the weights, since new ones come anyway.
            fleet.sleep(2)
        tokens = torch.tensor(rollouts["output_ids"], device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        # Gradients go before the engines want their memory back.
        optimizer.zero_grad(set_to_none=True)
        if sleeps:
            torch.cuda.empty_cache()
            fleet.wake("weights")
        result = fleet.refit(model, version=version)
        if sleeps:
            fleet.wake("kv_cache")
        print(f"version {result.version}: loss {loss.item():.3f}, {result.transport}: {result.reason}")
