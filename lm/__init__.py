"""lm: pretrain a small language model from one YAML file."""

__version__ = "0.1.0"
