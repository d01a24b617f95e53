"""Floating-point numbers of 4 to 8 bits: blocks with a scale, and the device functions of kernels that code them."""
