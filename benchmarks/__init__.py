"""Benchmarks: ``python -m benchmarks.NAME [--quick] [--json FILE]`` prints medians and ratios, writes records."""
