"""One worker process: an engine, both roles, a gRPC server, and the tensor-parallel ranks that follow rank 0."""
