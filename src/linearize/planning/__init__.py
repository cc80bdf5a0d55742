"""Plan a run without weights: parameters, bytes, FLOPs, and what fits a GPU or a cluster."""
