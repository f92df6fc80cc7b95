"""The loss of a task head on local tokens, step by step:

1. The hook of the task head (:mod:`~ds_cp.patches.transformers.task_head`) records the call as a :class:`.TaskHeadCall`. If the
   head's loss is one that ds_cp knows, the decoder leaves its hidden states local.
2. :mod:`.projection`: the projection to the vocabulary returns :class:`.DeferredLogits` instead of logits.
3. :mod:`.causal_lm` or :mod:`.label_smoothing`: the loss shifts and shards the labels, and asks the deferred logits for the sum of
   the cross entropy (:func:`ds_cp.chunked.cross_entropy.linear_cross_entropy`).
4. :func:`ds_cp.loss.mean_over_group` divides the sum over the context-parallel group by one count.
5. The hook of the task head returns the logits as :class:`.LocalLogits`, or as a tensor of all tokens in evaluation.
"""
