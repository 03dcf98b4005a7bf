"""Generated protobuf and gRPC stubs; regenerate with `make proto`. Never edited by hand."""
