"""Kernels of our own for CPUs, and the modules that use them.

One source, compiled for each set of vector instructions and each type of a model's numbers (forms.py).
Everything here is optional: a machine without such a CPU or without a C++ compiler runs the model as
transformers wrote it.
"""
