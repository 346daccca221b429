"""The benchmarks behind `make bench`; each file measures one thing, README.md says how to read them."""
