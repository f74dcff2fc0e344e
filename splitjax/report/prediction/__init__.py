"""Shows what is predicted before a step is compiled: time, memory, a machine's calibration, a search's answer."""
