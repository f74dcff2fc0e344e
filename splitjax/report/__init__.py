"""What a compiled step does, read from XLA's program and set beside its plan; and the documents of plans, reports,
profiles and advices, which `splitjax.display` lays out."""
