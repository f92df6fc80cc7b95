"""What a layer keeps for its backward pass, and where."""
