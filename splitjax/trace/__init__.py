"""Traces a training step and describes it: a step and example arguments go in, an immutable `graph.Graph` comes out.

The graph names the step's arrays (leaves), the layers that use them, and which dims have to, or should, be sharded
alike. Rules, cost models and lowering read it, so that none of them has to read jaxprs to decide a layout. `tracer`
has the order of the passes; `dims` is what users extend.
"""
