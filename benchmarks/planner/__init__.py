"""What the planner predicts, against what compilers make of it."""
