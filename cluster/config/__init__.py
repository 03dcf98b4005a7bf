"""The configuration under `metadata.serving` of cluster.yaml: its schema, its reader, its reference page.

`cluster.config.load.load_config` is the one way in; a ServingConfig that exists is valid. Knows nothing of Ray's part
of the file, which Ray checks, and starts nothing.
"""
