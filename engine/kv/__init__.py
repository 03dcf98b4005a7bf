"""The paged KV cache: who owns which block, and the tensor that holds them."""
