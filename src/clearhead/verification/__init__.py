"""Verification: measures on a model whether methods have the properties that they declare (`clearhead.verify`).

Some properties are declared by a method, such as completeness. Others are invariants that every method must satisfy,
such as the same scores in a batch.
"""

from clearhead.verification.verification import CheckResult, Verification, verify

__all__ = ["CheckResult", "Verification", "verify"]
