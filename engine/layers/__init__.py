"""Tensor-parallel layers and the operations between them."""
