"""A stand-in for `liger_kernel.transformers.model.llama` with its names and signatures."""

import torch.nn.functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast


def LigerForCausalLMLoss(
    hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None,
    final_logit_softcapping=None, return_token_accuracy=False, return_predicted_tokens=False, **kwargs,
):  # fmt: skip
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    logits = hidden_states.view(-1, hidden_size) @ lm_head_weight.t()
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits, shift_labels.view(-1), ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def lce_forward(self, input_ids=None, labels=None, skip_logits=None, **kwargs):
    hidden = self.model(
        input_ids=input_ids, **{k: v for k, v in kwargs.items() if k not in ("shift_labels", "num_items_in_batch")}
    )[0]
    kwargs = {k: kwargs[k] for k in ("shift_labels", "num_items_in_batch") if k in kwargs}
    if self.training if skip_logits is None else skip_logits:
        loss = LigerForCausalLMLoss(
            hidden_states=hidden,
            lm_head_weight=self.lm_head.weight,
            labels=labels,
            hidden_size=self.config.hidden_size,
            **kwargs,
        )
        return CausalLMOutputWithPast(loss=loss, logits=None)
    logits = self.lm_head(hidden)
    loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
    return CausalLMOutputWithPast(loss=loss, logits=logits)
