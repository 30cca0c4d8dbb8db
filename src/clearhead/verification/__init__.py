"""What a method declares, and what the laws promise of every method, measured on a model: `clearhead.verify`."""

from clearhead.verification.verification import Line, Verification, verify

__all__ = ["Line", "Verification", "verify"]
