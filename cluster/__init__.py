"""What every process shares: config, lifecycle, errors, rpc, generated stubs and the CLI. Knows no torch and no model."""
