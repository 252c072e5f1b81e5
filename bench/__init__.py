"""Benchmarks. Timings are noisy: everything that is compared is run in turn, in one process, and medians are given."""
