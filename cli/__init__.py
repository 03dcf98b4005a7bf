"""The `baton` command: one module for each subcommand. Knows the cluster only through gRPC and cluster.yaml."""
