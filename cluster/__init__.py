"""The ground that processes share: config, settings, errors, rpc, TLS, keys, state, stubs. Imports no torch, no Ray."""
