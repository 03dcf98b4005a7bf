"""Runs the model: checkpoints, paged KV, attention, sampling. Torch only: no rpc, no Ray, no Redis, no text."""
