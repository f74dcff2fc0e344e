"""Steps in today's idioms beside layouts written by hand: what both compile to."""
