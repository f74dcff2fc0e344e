"""Measures time, bytes and noise of one worker, on one device.

A decorated step and real batches come in; profiles of sparsity, advice on partial backpropagation, and jobs for the
scheduler come out. It stands above `splitjax.compile` because it runs what the other rooms made, and changes nothing of
it.
"""
