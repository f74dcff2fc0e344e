"""A plan as people see it: its table, the lines beneath, the document of both, the picture."""
