"""One accelerator: what is predicted of a step's memory and time, against the compiler and the device itself."""
