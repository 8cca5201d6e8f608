"""A small byte-level GPT, trained with the same numbers in JAX and in PyTorch."""
