"""State-space models, one file a published architecture."""
