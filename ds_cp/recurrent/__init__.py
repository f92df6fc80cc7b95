"""Layers that mix tokens without attention: recurrences and short convolutions."""
