"""Write converted models as stock models, which engines run without linearize."""
