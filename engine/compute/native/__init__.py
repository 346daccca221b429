"""Kernels of our own for bfloat16 on CPUs with AVX-512 BF16, and the modules that use them.

Everything here is optional: a machine without such a CPU or without a C++ compiler runs the model as
transformers wrote it.
"""
