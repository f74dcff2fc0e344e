"""Reads from XLA's program what a compiled step does and sets it beside the plan; and makes the documents of plans,
reports, profiles and advices, which `splitjax.display` lays out."""
