"""Kernels for NVIDIA GPUs in Triton, each beside the function that launches it; see `engine.triton.target`."""
