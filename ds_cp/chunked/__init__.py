"""What runs on a few tokens at a time: the loss, modules that look at one token, layers that attend."""
