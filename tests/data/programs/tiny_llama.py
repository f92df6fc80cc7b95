"""A tiny model and three batches of one row."""

import deepspeed.ops
import torch
from transformers import LlamaConfig, LlamaForCausalLM

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # avoids a C++ build that the test does not need
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        vocab_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
)
data = torch.utils.data.DataLoader(torch.arange(64).repeat(3, 1), batch_size=1)
