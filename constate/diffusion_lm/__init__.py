"""Masked text diffusion, one file a published architecture."""
