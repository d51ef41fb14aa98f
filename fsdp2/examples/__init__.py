"""Runnable examples.

``python -m fsdp2.examples.train_lm`` trains a small language model,
``python -m fsdp2.examples.vit_10b`` a vision transformer of ten billion parameters,
``python -m fsdp2.examples.train_digits`` a CNN on handwritten digits, and
``python -m fsdp2.examples.train_imagenet`` a ResNet on a folder of images.
"""
