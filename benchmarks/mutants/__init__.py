"""Whether the tests notice faults: one line of the package is changed at a time, and a test that is named has to fail.

`faults.toml` holds the faults as data, `faults.py` reads and checks them, `run.py` runs the tests of each, `page.py`
writes what came of it, `main.py` is the command.
"""
