"""The whole engine on a CUDA device, with models made there: `python -m tests.bench.gpu`."""
