"""A training loop for `accelerate launch`: losses and attention of each rank, written to a file per rank."""

import json
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim
from tiny_llama import data, model

accelerator = Accelerator()
model, optimizer, data = accelerator.prepare(model, DummyOptim(model.parameters()), data)
losses = []
for ids in data:
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    losses.append(loss.item())
with open(sys.argv[1] + os.environ["RANK"], "w") as file:
    json.dump([losses, model.module.config._attn_implementation], file)
torch.distributed.destroy_process_group()
