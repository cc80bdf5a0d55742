"""What a student is worth beside its teacher: loss per token, recall beyond the window, speed and memory.

Works on any Hugging Face causal LM, and reports every mean with a 95 % bootstrap interval.
"""
