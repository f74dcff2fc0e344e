"""Step + example arguments -> Graph."""
