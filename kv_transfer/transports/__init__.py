"""Transports that carry slots between two ranks, and the registry that lists them."""
