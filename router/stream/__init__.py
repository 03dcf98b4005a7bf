"""A request while it runs: its state, its text, its retries, and how its output reaches the client."""
