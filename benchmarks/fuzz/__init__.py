"""Whether any input makes a parser fail other than by its own typed error, or take too much memory or time."""
