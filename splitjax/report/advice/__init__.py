"""Makes the document of an `Advice` on partial backpropagation, and the rows of its tables."""
