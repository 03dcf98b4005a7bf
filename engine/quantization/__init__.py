"""Weights in fewer bits: formats, and the checkpoints that hold them packed."""
