"""What is explained: how a kind of model takes input, what its units are called, which row is read."""

from clearhead.subjects import image, masked, text  # noqa: F401  (importing a subject registers it)
from clearhead.subjects.base import How, Sample, Subject, register_subject, subject_for

__all__ = ["How", "Sample", "Subject", "register_subject", "subject_for"]
