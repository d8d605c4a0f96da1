"""The ranks of an axis in lock step, in one process."""
