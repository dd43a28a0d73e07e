"""Part of the stand-in."""

from torchvision import __getattr__ as __getattr__
