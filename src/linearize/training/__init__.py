"""Training: data, the loop, and the stages."""
