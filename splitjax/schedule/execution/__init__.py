"""Runs jobs for real, by engines of processes or threads, under the policies that the simulator asks.

Programs of jobs and a policy come in; an `Execution` with the record of every task comes out. Nothing here knows JAX.
"""
