"""Says whether a step fits on a machine that need not be here, by the prediction and by that machine's own compiler."""
