"""Reads from a compiled step what a device stores when, and shows it beside the prediction."""
