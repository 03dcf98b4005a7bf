"""The controller: keeps the workers and routers of a configuration running, and changes them while they serve."""
