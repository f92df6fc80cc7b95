"""Less memory per token: layers and MLPs in chunks of tokens, activations in host memory, attention that is not recomputed."""
