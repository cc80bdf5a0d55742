"""What a run means and costs, counted without weights: parameters, bytes, FLOPs, and what fits a GPU or a cluster."""
