"""Rewrites of the loops of recurrent layers, so that their products lie on devices as those of other layers do."""
