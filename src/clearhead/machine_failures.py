"""Classification of torch errors: failures of the machine (memory, device) as opposed to errors of a model."""

import torch

#: Fragments of torch's messages for out-of-memory errors and device failures. Not all of these have their own class:
#: the CPU allocator and cuBLAS raise a plain RuntimeError.
_MESSAGES = (
    *("out of memory", "can't allocate memory", "not enough memory", "allocation failed", "alloc_failed"),
    *("cuda error", "hip error", "device-side", "execution_failed", "not_initialized", "internal_error", "interrupted"),
)
#: Fragments for kernels that the device lacks: those are errors of the operation, not of the machine.
_UNSUPPORTED = ("not_supported", "no kernel image")


def is_machine_failure(problem: RuntimeError) -> bool:
    """Return whether a torch error is a failure of the machine.

    Args:
        problem: The error.

    Returns:
        True for out-of-memory errors and device failures.

    Example:
        >>> is_machine_failure(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
        True
        >>> is_machine_failure(RuntimeError("mat1 and mat2 must have the same dtype, but got Float and Double"))
        False
    """
    if isinstance(problem, torch.OutOfMemoryError):
        return True
    message = str(problem).lower()
    if any(fragment in message for fragment in _UNSUPPORTED):
        return False
    return any(fragment in message for fragment in _MESSAGES)
