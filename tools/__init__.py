"""The tools that people use around a cluster: the Python client, `baton doctor`, `baton bench`."""
