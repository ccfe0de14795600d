"""Measurements of models and kernels: memory, speed, and whether every op agrees with its specification."""
