"""What every model is built of: states, mixers, the stack, decoding, weights. Knows ops, no architecture."""
