"""The fused kernels against their references, and what they are used in."""
