"""One worker process: hosts an engine and both roles, speaks gRPC, and keeps its tensor-parallel ranks in step."""
