"""Configs of recipes and layer plans, validated by pydantic. They import no torch, so reading a recipe is fast."""
