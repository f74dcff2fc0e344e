"""The words of a command line: options as fields of dataclasses (`fields`), read with a remedy for every mistake
(`reading`), and explained in the columns of a terminal (`helping`)."""
