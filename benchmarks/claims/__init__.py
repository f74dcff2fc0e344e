"""The figures that README and docs state, checked against the pages of results."""
