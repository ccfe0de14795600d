"""From prompts to text: `generate` for results, `stream` for text as it comes.

Nothing is kept on the model: two calls, also from two threads, know nothing of each other.
"""

from .records import Event, Result, Settings, Usage
from .run import generate, stream

__all__ = ["Event", "Result", "Settings", "Usage", "generate", "stream"]
