"""The backends that run whole models within a test's time. Triton's interpreter does not: its kernels, and
the decode steps made of them, have tests of their own."""

from constate.kernels.dispatch import available

BACKENDS = tuple(row.backend for row in available("cpu") if row.here and row.backend != "triton")
