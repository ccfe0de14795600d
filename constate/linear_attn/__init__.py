"""Linear attention with a recurrent state, one file a published architecture."""
