"""What every process shares: config, lifecycle, errors, rpc, generated stubs, the CLI. Knows no torch and no model."""
