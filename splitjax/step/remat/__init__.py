"""Computes repeated blocks of a loss again in the backward pass, where the step itself says nothing."""
