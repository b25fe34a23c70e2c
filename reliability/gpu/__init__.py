"""The Triton kernels without a GPU: equal to `eager` in the interpreter, and compiled for GPUs that are not there."""
