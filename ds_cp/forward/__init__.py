"""What the ranks of a group share while one forward of a model runs."""
