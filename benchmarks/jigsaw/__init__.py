"""The scheduler's claims: a part a module with `section(quick, data_dir)`; modules without one help them."""
