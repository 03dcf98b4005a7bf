"""The decode role: which sequences to step next, and the receiving side of the hand-off. No sockets, no tensors."""
