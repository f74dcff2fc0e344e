"""Faults in launched runs (kills, hangs, full disks, damaged checkpoints), and what has to be left afterwards."""
