"""Which errors of torch are about the machine (memory, device), and so say nothing about a model."""

import torch

#: Words in the messages of torch for lack of memory and failures of a device. Not all of them have their own class:
#: the CPU's allocator and cuBLAS raise a plain RuntimeError.
_MESSAGES = (
    *("out of memory", "can't allocate memory", "not enough memory", "allocation failed", "alloc_failed"),
    *("cuda error", "hip error", "device-side", "execution_failed", "not_initialized", "internal_error", "interrupted"),
)
#: A kernel that the device does not have: that is about the operation.
_UNSUPPORTED = ("not_supported", "no kernel image")


def is_machine_failure(problem: RuntimeError) -> bool:
    """Whether an error of torch is about the machine.

    >>> is_machine_failure(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    True
    >>> is_machine_failure(RuntimeError("mat1 and mat2 must have the same dtype, but got Float and Double"))
    False
    """
    if isinstance(problem, torch.OutOfMemoryError):
        return True
    message = str(problem).lower()
    return any(part in message for part in _MESSAGES) and not any(part in message for part in _UNSUPPORTED)
