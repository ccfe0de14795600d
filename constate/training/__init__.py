"""Training the tiny models: recipes, batches, optimisers, the loop, and held-out bits per byte.

from constate.training import train

for report in train("hybrid", "out/hybrid", threads=1):
    print(report)
"""

from .recipes import SHIPPED, Recipe, find
from .run import build, train
from .score import bits_per_byte

__all__ = ["SHIPPED", "Recipe", "bits_per_byte", "build", "find", "train"]
