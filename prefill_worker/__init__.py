"""The prefill role: which prompts to compute next, and the sending side of the hand-off. No sockets, no tensors."""
