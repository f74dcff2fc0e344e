"""Makes the document of a `Profile` of sparse gradients, the rows of its tables, and its picture."""
