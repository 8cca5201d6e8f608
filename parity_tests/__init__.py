"""Cross-framework parity: `python -m parity_tests` compares every side with each other.

A *scenario* is one training run (recipe, precision, region, checkpoint, micro-batches).
A *side* is something that can run it or has recorded it: `jax_fp8`, `torch_ref`, the
recordings of transformer_engine, a plain numpy reading of the law, or a live
transformer_engine. Each side turns a scenario into a *trajectory*; `compare` holds one
trajectory against another with the tolerances of `tolerances`.
"""
