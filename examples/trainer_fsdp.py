"""A trainer of several processes under FSDP2: each sends the shards that it holds, and nothing is gathered.

torchrun --nproc-per-node 2 examples/trainer_fsdp.py http://quickstart-sync.default.svc:8080 /var/lib/rolloutfleet/models/tiny-qwen2
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import rolloutfleet

address, path = sys.argv[1:3]
gpus = torch.cuda.is_available()
if gpus:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if gpus else "gloo")
device = torch.device("cuda" if gpus else "cpu")

tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampling = rolloutfleet.Sampling(max_new_tokens=16, temperature=1.0)

# Every rank connects, generates for itself what it trains on, and calls refit() with the same version.
with rolloutfleet.connect(address, team=dist.group.WORLD) as fleet:
    start = fleet.view().version
    for version in range(start + 1, start + 4):
        prompt = tokenizer("Once upon a time" if dist.get_rank() % 2 else "The fleet").input_ids
        rollouts = fleet.generate([prompt], [len(prompt)], sampling=sampling)
        tokens = torch.tensor(rollouts["output_ids"], device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result = fleet.refit(model, version=version)
        if dist.get_rank() == 0:
            print(f"version {result.version}: loss {loss.item():.3f}, {result.transport}, staged: {result.staged}")
dist.destroy_process_group()
