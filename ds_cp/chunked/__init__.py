"""Computation in chunks of tokens: the loss, modules that act on each token alone, and layers with attention."""
