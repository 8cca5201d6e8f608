"""Tests of torch_ref."""
