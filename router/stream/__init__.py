"""A request while it runs: its state, its output, and how the output reaches the client."""
