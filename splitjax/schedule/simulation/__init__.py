"""Simulates what would happen: events in order of time under one policy, compared with others and drawn.

A cluster, jobs and a policy come in; a `SimulationResult` comes out. The package is not called like its function
`splitjax.schedule.simulate`, which would hide it.
"""
