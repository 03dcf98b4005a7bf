"""Model families, and what a checkpoint folder says about its model."""
