"""Wheels with the kernels in them, for machines without a compiler."""
