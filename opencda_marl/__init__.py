"""OpenCDA-MARL: trains cooperative driving policies, fast and reproducibly."""

__all__ = ["__version__"]

__version__ = "0.1.0"
