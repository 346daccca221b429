"""Steps on a CUDA device: the runner, its graphs and the Triton kernels."""
