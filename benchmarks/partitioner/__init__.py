"""Drawn programs that look for what XLA's partitioner computes wrongly, by hand and under splitjax."""
