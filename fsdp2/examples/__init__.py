"""Runnable examples.

``python -m fsdp2.examples.train_lm`` trains a small language model,
``python -m fsdp2.examples.vit_10b`` plans or trains a vision transformer of ten billion parameters.
``python -m fsdp2.examples.train_digits`` trains a CNN on handwritten digits.
"""
