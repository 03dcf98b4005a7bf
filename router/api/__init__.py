"""The public API: the gRPC services, validation and tokenization of requests."""
