"""The model's operations: per file one op, a PyTorch twin (CPU path and reference) and a Triton kernel of the same signature.

This folder imports torch and Triton only. A function named like its file picks the backend by the device of its tensors;
`*_torch` is the twin, `*_triton` the kernel (which also runs on CPU under `TRITON_INTERPRET=1`).
"""
