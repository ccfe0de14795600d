"""Models whose layers differ, and the transformer, whose every layer is attention."""
