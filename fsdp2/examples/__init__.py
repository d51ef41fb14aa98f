"""Runnable examples: ``python -m fsdp2.examples.train_lm`` trains a small language model."""
