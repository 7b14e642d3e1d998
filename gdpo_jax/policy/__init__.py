"""Decoder-only policies in Flax, their weights and their tokenizers."""
