"""Losses that take local tokens, and logits that wait for them."""
