"""Measurements. Each module runs by itself: `python -m benchmarks.save_load`."""
