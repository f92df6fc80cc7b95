"""Layers other than attention that mix tokens: recurrences and short convolutions."""
