"""Training: the loop, and the stages."""
