"""Attention over paged KV: one interface, and its implementations for CPUs and GPUs."""
